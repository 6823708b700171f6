#: group: pi
#: about: LIO offers no protection information over iSER, because rdma_rxe has no integrity handover (docs/seeds.md)
#: limit: 420
SCHEME=iser
. /vm/lio.sh
lio_rig
store=/sys/kernel/config/target/core/fileio_0/f0
lio_attribute t10_pi 1
# The type can only be changed while the disk is not exported.
rm "$LIO/lun/lun_0/disk"
echo 1 >$store/attrib/pi_prot_type
echo 1 >$store/attrib/pi_prot_format
ln -s $store "$LIO/lun/lun_0/disk"
riser_on roce inquiry -o json "$(lio_lun 0)" | tee /tmp/said
grep -q '"protection": false' /tmp/said || fail "LIO reports protection information: use it as a judge"
rm "$IMAGES/lio.img.protection"
