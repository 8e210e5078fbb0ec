"""Formats of states, masters and elements: what their bits mean. One module per idea."""
