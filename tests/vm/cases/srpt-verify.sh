#: group: srpt
#: about: verified I/O from 512 B to 4 MiB to files and RAM disks of ib_srpt, with one and more channels
#: limit: 420
two_hosts
trap kernel_target_clean EXIT
kernel_target
bench() {
    local provider=$1 lun=$2 keys=$3 bs=$4
    echo "--- $provider lun $lun $keys bs $bs"
    riser_on "$provider" bench --overwrite "$(lun "$lun")$keys" --rw randrw --mix 40 --bs "$bs" --depth 16 --jobs 2 \
        --total "${5:-8M}" --size 48M --warm-up 0 --verify --timeout 60s
}
for provider in roce rdma_core; do
    bench $provider 0 "" 512 1M
    bench $provider 1 "&channels=4" 4K
    bench $provider 0 "&channels=2&immediate=0" 8K
    bench $provider 1 "&immediate=0&register_always=0&cmd_sg_entries=12" 128K 24M
    bench $provider 0 "&channels=4&queue_size=256" 1M 48M
    bench $provider 1 "&queue_size=2" 4M 48M
done
