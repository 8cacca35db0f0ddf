"""What every part uses: files, text that is safe to show, plain numbers, timing, and the state of the process."""
