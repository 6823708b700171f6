#: group: srp
#: about: the same with a multipath device that works on bios, one channel
#: limit: 300
PARAMS=ch_count=1 MODE=bio
three_disks_rig
files_under_disconnects
