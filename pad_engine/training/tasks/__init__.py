"""Tasks: prompts, the final answer in a text, and whether it is right. One file each; task.py says what one must
offer."""
