"""What runs on volunteers' computers, and how it is packaged."""
