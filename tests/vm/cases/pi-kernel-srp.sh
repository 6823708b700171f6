#: group: pi
#: about: the kernel uses protected disks over SRP as ordinary disks
#: limit: 900
OVER=srp
. /vm/pi.sh
ordinary_disks
