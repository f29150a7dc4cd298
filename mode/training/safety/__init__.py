"""What keeps a run from going wrong without a word: signals, hangs, wrong settings, directories that are not shared."""
