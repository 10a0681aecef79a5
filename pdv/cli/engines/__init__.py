"""`pdv export` and `pdv import`: plans for engines that people run, and their configurations priced."""
