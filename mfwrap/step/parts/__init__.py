"""Parts of which users build a step of their own: gradient functions, attributes of the cells."""
