#: group: srp
#: about: files on a multipath device while its paths log out and in
#: limit: 300
PARAMS=ch_count=4
three_disks_rig
files_under_disconnects
