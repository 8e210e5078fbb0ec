"""Where checkpoints are: folders, and the files that say what is in them and whether they are whole."""
