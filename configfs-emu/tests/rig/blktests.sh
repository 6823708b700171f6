# Configures LIO and removes the configuration like the SRP group of blktests.
set -e
cd /sys/kernel/config/target/core
truncate -s 8M "$FOLDER/vdev0" "$FOLDER/vdev1"
for i in 0 1; do
    mkdir fileio_$i
    mkdir fileio_$i/vdev$i
    echo "fd_dev_name=$FOLDER/vdev$i,fd_dev_size=8388608," > fileio_$i/vdev$i/control
    echo "6e756c6c6${i}00000000000000" > fileio_$i/vdev$i/wwn/vpd_unit_serial
    echo 1 > fileio_$i/vdev$i/enable
done
cd /sys/kernel/config/target
mkdir srpt
cd srpt
test -e discovery_auth/rdma_cm_port
echo 5555 > discovery_auth/rdma_cm_port
port=0x00000000000000000000ffff7f000001
mkdir $port
mkdir $port/$port
for i in 0 1; do
    mkdir $port/$port/lun/lun_$i
    (cd $port/$port/lun/lun_$i && ln -s "../../../../../core/fileio_$i/vdev$i" .)
done
for ini in 0002:c903:00a1:b2c3 10.0.0.2 fe80:0000:0000:0000:5054:00ff:fe12:3456; do
    cd /sys/kernel/config/target/srpt/$port/$port/acls
    mkdir $ini
    cd $ini
    for i in 0 1; do
        (mkdir lun_$i && cd lun_$i && ln -s "../../../lun/lun_$i" .)
    done
done
cd /sys/kernel/config/target
echo 1 > srpt/$port/$port/enable
test "$(cat srpt/$port/$port/enable)" = 1
test "$(readlink -f srpt/$port/$port/lun/lun_1/vdev1)" = "$PWD/core/fileio_1/vdev1"
touch "$FOLDER/served"
cd /
set +e
for e in /sys/kernel/config/target/srpt/*/*/enable; do echo 0 > $e; done
cd /sys/kernel/config/target
rmdir */*/*/np/* 2> /dev/null
rmdir */*/*/np 2> /dev/null
rm -f */*/*/acls/*/*/* 2> /dev/null
rmdir */*/*/acls/*/* 2> /dev/null
rmdir */*/*/acls/* 2> /dev/null
rm -f */*/*/lun/*/* 2> /dev/null
rmdir */*/*/lun/* 2> /dev/null
rmdir */*/*/*/* 2> /dev/null
rmdir */*/* 2> /dev/null
rmdir */* 2> /dev/null
rmdir * 2> /dev/null
set -e
test ! -e srpt
test ! -e core/fileio_0
test -d core/alua
