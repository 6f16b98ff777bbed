"""Rows of cases and one timer. Figures come from here and from nowhere else; tests never ask how fast."""
