"""Folders of checkpoints, and the files that describe their contents and prove them whole."""
