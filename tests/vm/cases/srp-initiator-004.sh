#: group: srp
#: about: the same with a multipath device that works on requests, one channel
#: limit: 300
PARAMS=ch_count=1
three_disks_rig
files_under_disconnects
