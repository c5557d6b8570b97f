"""Run the callbacks of MindFormers' PyNative trainer in a Trainer."""
