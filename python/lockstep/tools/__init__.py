"""Tools behind the command ``lockstep``. The command itself needs the extra ``tools``; training does not."""
