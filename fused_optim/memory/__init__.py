"""Where states lie: their layout, page-locked memory, copies that saves are making."""
