#: group: srp
#: about: files on a request-based multipath device while its paths log out and in, one channel
#: limit: 300
PARAMS=ch_count=1
three_disks_rig
files_under_disconnects
