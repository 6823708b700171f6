#: group: srp
#: about: raw multipath device while its paths log out and in
#: limit: 300
PARAMS=ch_count=4
three_disks_rig
exec 3</dev/mapper/paths
load /dev/mapper/paths 15 --iodepth=64
disconnect_repeatedly 3
loaded
exec 3<&-
