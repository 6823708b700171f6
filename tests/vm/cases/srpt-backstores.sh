#: group: srpt
#: about: riser writes, flushes and loses sessions over srp, on fileio, block and ramdisk with write cache and FUA on and off
#: limit: 900
SCHEME=srp
. /vm/backstores.sh
all_backstores
