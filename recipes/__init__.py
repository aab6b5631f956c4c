"""Language-model recipes, written as for one device."""
