#: group: pi
#: about: the kernel uses protected disks over SRP as ordinary disks
#: limit: 1800
OVER=srp
. /vm/pi.sh
ordinary_disks
