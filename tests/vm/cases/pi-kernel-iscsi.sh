#: group: pi
#: about: the kernel uses protected disks over iSCSI as ordinary disks
#: limit: 1800
OVER=iscsi
. /vm/pi.sh
ordinary_disks
