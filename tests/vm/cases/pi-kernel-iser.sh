#: group: pi
#: about: the kernel uses protected disks over iSER as ordinary disks
#: limit: 1800
OVER=iser
. /vm/pi.sh
ordinary_disks
