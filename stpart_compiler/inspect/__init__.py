"""Views of plans and programs for people: text dumps, tables and graphs."""
