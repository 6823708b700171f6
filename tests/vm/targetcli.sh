# Functions for the targetcli case, after iscsi.sh: runs one session with the kernel's target and
# with riserd, using the tree of riserd-configfs, and then uses the result with the kernel's
# initiators.
FOLDER=/tmp/targetcli
TREE=/sys/kernel/config/target
SECRET=a-secret-of-the-host

# Prints the commands typed by a user: cli_session ADDRESS
cli_session() {
    local address=$1 tpg=/iscsi/$IQN/tpg1
    cat <<END
/backstores/fileio create name=img file_or_dev=$IMAGES/cli.img size=64M wwn=5a0e1b2c-0000-4000-8000-0123456789ab
/backstores/ramdisk create name=ram size=32M wwn=6b0e1b2c-0000-4000-8000-0123456789ac
/iscsi create $IQN
$tpg/luns create /backstores/fileio/img
$tpg/luns create /backstores/ramdisk/ram
$tpg set attribute authentication=1
$tpg/acls create $HOST
$tpg/acls/$HOST set auth userid=host password=$SECRET
$tpg/portals delete 0.0.0.0 3260
$tpg/portals create $address 3260
$tpg/portals/$address:3260 enable_iser boolean=true
END
}

# Prints the GUID of the kernel's RDMA device, which is a part of the ib_srp name.
host_guid() {
    cut -d: -f5-8 /sys/class/infiniband/rxe0/ports/1/gids/0 | tr -d :
}

# Configures SRP with rtslib, because targetcli only creates ports for kernel devices, and saves
# everything: srp_session SRP_PORT
srp_session() {
    cat <<END
from rtslib_fb import FabricModule, LUN, MappedLUN, NodeACL, RTSRoot, Target, TPG
ram = [so for so in RTSRoot().storage_objects if so.name == "ram"][0]
tpg = TPG(Target(FabricModule("srpt"), "ib.$1"), 1)
MappedLUN(NodeACL(tpg, "ib.0000000000000000$(host_guid)"), 0, LUN(tpg, 0, ram))
tpg.enable = True
RTSRoot().save_to_file()
END
}

# Runs a command that uses the kernel's tree.
on_lio() {
    dbus-run-session -- sh -c 'DBUS_SYSTEM_BUS_ADDRESS=$DBUS_SESSION_BUS_ADDRESS exec "$@"' sh "$@"
}

# Runs a bash command with riserd's tree in place of the kernel's tree.
on_riserd() {
    nsenter --net=/run/netns/peer unshare -m --propagation private dbus-run-session -- \
        bash "$RISER_ROOT/configfs-emu/tests/rig/namespace.sh" $FOLDER "$1"
}

# Prints a command that reads all objects created by the session: ask_tree ADDRESS SRP_PORT
ask_tree() {
    echo "python3 $RISER_ROOT/tests/vm/attributes.py ask $TREE ADDRESS=$1 PORT=$2 --" \
        "core/alua core/fileio_0 core/rd_mcp_1 iscsi srpt"
}

# Adds the host's secret to the record of the target.
know_secret() {
    iscsi_set node.session.auth.authmethod CHAP node.session.auth.username host \
        node.session.auth.password $SECRET
}

# Prints the state of a disk that was reserved by the host, with the session's ISID replaced by
# ISID: report_reservations ADDRESS RUN FILE, where RUN is the command to access the tree.
report_reservations() {
    local portal=$1:3260 files=$TREE/core/fileio_0/img/pr/res_*
    IFACE=default
    iscsi_node "$portal"
    know_secret
    iscsi_login "$portal"
    sg_persist --out --register --param-sark=0x5eed "$DISK"
    sg_persist --out --reserve --param-rk=0x5eed --prout-type=5 "$DISK"
    $2 "grep -H '' $files" >/tmp/reserved
    sg_persist --out --clear --param-rk=0x5eed "$DISK"
    sg_raw "$DISK" 16 00 00 00 00 00
    $2 "grep -H '' $files" >>/tmp/reserved
    sg_raw "$DISK" 17 00 00 00 00 00
    iscsi_logout
    iscsiadm -m node -T $IQN -o delete
    sed -E "s/,i,0x[0-9a-f]{12}/,i,ISID/" /tmp/reserved >"$3"
    grep -q "Initiator: $HOST,i,ISID" "$3" || fail "the disk is not reserved by the host"
}

# Writes the responses of the kernel's target to lio.txt.
ask_lio() {
    local port
    port=$(tr -d : </sys/class/infiniband/rxe0/ports/1/gids/0)
    modprobe -a target_core_mod target_core_file iscsi_target_mod ib_isert ib_srpt
    cli_session 10.99.0.1 | on_lio targetcli
    srp_session "$port" >/tmp/srp.py
    on_lio python3 -I /tmp/srp.py
    $(ask_tree 10.99.0.1 "$port") >"$KEEP/lio.txt"
    clear_lio
    # Some queries change the state: the kernel either writes reservations to a file, or has none.
    mkdir -p /etc/rtslib-fb-target/pr
    cli_session 10.99.0.1 | on_lio targetcli
    report_reservations 10.99.0.1 "sh -c" "$KEEP/lio-reserved.txt"
    clear_lio
}

clear_lio() {
    on_lio targetcli clearconfig confirm=True
    rm "$IMAGES/cli.img"
}

# Starts riserd with or without its previous state, and mounts its tree.
serve_tree() {
    mkdir -p $FOLDER/config $FOLDER/etc/backup
    cat >/tmp/riserd.yaml <<END
targets: []
admin: { socket: $FOLDER/admin.sock }
state: { directory: $FOLDER/state }
END
    export RISERD_SOCKET=$FOLDER/admin.sock
    ip netns exec peer "$RISER_BIN/riserd" run --restore --config /tmp/riserd.yaml >>"$KEEP/riserd.log" 2>&1 &
    RISERD=$!
    wait_for 30 test -S $FOLDER/admin.sock
    modprobe fuse
    nsenter --net=/run/netns/peer "$RISER_BIN/riserd-configfs" $FOLDER/config >>"$KEEP/configfs.log" 2>&1 &
    CONFIGFS=$!
    wait_for 30 test -d $FOLDER/config/target
}

# Stops both normally.
end_tree() {
    umount $FOLDER/config
    wait $CONFIGFS
    stop_serving
}

targetcli_clean() {
    umount -l $FOLDER/config 2>/dev/null || true
    (srp_logout) || true
    modprobe -r ib_srp ib_iser 2>/dev/null || true
    iscsi_clean
}

# Writes and reads data over TCP, iSER and SRP.
use_it() {
    local iface
    for iface in default iser; do
        IFACE=$iface
        iscsi_node
        know_secret
        iscsi_login
        verify "$DISK" 2m --bs=16k
        iscsi_logout
        iscsiadm -m node -T $IQN -o delete
    done
    srp_login
    verify "$DISK" 2m --bs=16k
    srp_logout
}

# Reads files in riserd's tree, for use by `says` and `counts`: read_tree FILE …
read_tree() {
    on_riserd "cd $TREE && grep -H '' $*" >/tmp/values
    cat /tmp/values
}

# Checks the contents of a file that was read: says FILE TEXT
says() {
    grep -qFx "$1:$2" /tmp/values || fail "$1 does not contain $2"
}

# Prints the contents of a file that was read.
said() {
    local said
    said=$(grep -F "$1:" /tmp/values) || fail "$1 was not read"
    echo "${said##*:}"
}

# Checks that a counter includes all our operations, and fewer additional operations by the kernel
# and udev for a new disk: counts FILE NUMBER
counts() {
    local said
    said=$(said "$1")
    [ "$said" -ge "$2" ] && [ "$said" -lt $((2 * $2)) ] || fail "$1 is $said, expected $2 or slightly more"
}

# An initiator without the secret is rejected, and a session is shown until it's closed.
sessions_are_shown() {
    local acl=iscsi/$IQN/tpgt_1/acls/$HOST
    IFACE=default
    iscsi_node
    iscsi_refused 24
    know_secret
    iscsi_login
    verify "$DISK" 1m --bs=16k
    read_tree "$acl/info" "$acl/param/InitialR2T" "$acl/fabric_statistics/iscsi_sess_stats/*" \
        "$acl/lun_0/statistics/scsi_att_intr_port/port_ident" \
        "iscsi/$IQN/fabric_statistics/iscsi_instance/sessions"
    says "$acl/info" "InitiatorName: $HOST"
    says "iscsi/$IQN/fabric_statistics/iscsi_instance/sessions" 1
    counts "$acl/fabric_statistics/iscsi_sess_stats/cmd_pdus" 128
    says "$acl/fabric_statistics/iscsi_sess_stats/rxdata_octs" $((1 << 20))
    counts "$acl/fabric_statistics/iscsi_sess_stats/txdata_octs" $((1 << 20))
    iscsi_logout
    iscsiadm -m node -T $IQN -o delete
}

# Checks the counters: 1 MiB in each direction over TCP, and then 2 MiB over each of the three
# protocols, in pieces of 16 KiB.
commands_are_counted() {
    local tpg=iscsi/$IQN/tpgt_1 of_target=iscsi/$IQN/fabric_statistics port=srpt/0x$1/tpgt_1 files lu
    local img=core/fileio_0/img/statistics/scsi_lu ram=core/rd_mcp_1/ram/statistics/scsi_lu
    local lun=$tpg/lun/lun_0/statistics/scsi_tgt_port
    local by_host=$tpg/acls/$HOST/lun_0/statistics/scsi_auth_intr
    local by_srp=$port/acls/0x0000000000000000$(host_guid)/lun_0/statistics/scsi_auth_intr
    read_tree "$img/*" "$ram/*" "$lun/*" "$by_host/*" "$by_srp/*" "$of_target/*/*"
    for lu in $img $ram; do says $lu/status available; done
    counts $img/num_cmds 640
    says "$lun/in_cmds" "$(said $img/num_cmds)"
    says "$by_host/num_cmds" "$(said $img/num_cmds)"
    counts "$by_srp/num_cmds" 256
    # The iSCSI hosts also query this disk, but don't use it.
    [ "$(said $ram/num_cmds)" -ge "$(said "$by_srp/num_cmds")" ] || fail "a disk counted less than one of its hosts"
    for lu in $img "$lun" "$by_host"; do
        says "$lu/read_mbytes" 5
        says "$lu/write_mbytes" 5
    done
    for lu in $ram "$by_srp"; do
        says "$lu/read_mbytes" 2
        says "$lu/write_mbytes" 2
    done
    says "$of_target/iscsi_login_stats/accepts" 4
    says "$of_target/iscsi_login_stats/authenticate_fails" 1
    says "$of_target/iscsi_logout_stats/normal_logouts" 4
    says "$of_target/iscsi_tgt_attr/login_fails" 1
    says "$of_target/iscsi_tgt_attr/fail_intr_name" "$HOST"
    says "$of_target/iscsi_tgt_attr/fail_intr_addr" 10.99.0.1
    says "$of_target/iscsi_instance/sessions" 0
}

serve_by_targetcli() {
    local port=00000000000000000000ffff0a630002 differs=
    two_hosts
    trap targetcli_clean EXIT
    modprobe ib_iser
    start_iscsid
    ask_lio
    serve_tree
    cli_session 10.99.0.2 >/tmp/session
    srp_session $port >/tmp/srp.py
    on_riserd "targetcli </tmp/session; python3 -I /tmp/srp.py; $(ask_tree 10.99.0.2 $port) >$KEEP/riserd.txt"
    python3 "$RISER_ROOT/tests/vm/attributes.py" compare "$KEEP/lio.txt" "$KEEP/riserd.txt" \
        "$RISER_ROOT/tests/vm/targetcli-differences.txt" || differs=yes
    on_peer "$RISER_BIN/riserd" save /tmp/saved.yaml
    cat /tmp/saved.yaml
    GUID=$(on_peer "$RISER_BIN/riserd" check -o json /tmp/saved.yaml |
        python3 -c 'import json,sys; print([p["ioc_guid"] for t in json.load(sys.stdin)["targets"] for p in t["portals"] if p["protocol"] == "srp"][0].removeprefix("0x"))')
    load_srp
    report_reservations 10.99.0.2 on_riserd "$KEEP/riserd-reserved.txt"
    diff "$KEEP/lio-reserved.txt" "$KEEP/riserd-reserved.txt" || differs=yes
    sessions_are_shown
    use_it
    commands_are_counted $port
    # Use the daemon's own state, and then a host that only has the state saved by targetcli.
    end_tree
    serve_tree
    use_it
    end_tree
    rm -r $FOLDER/state
    serve_tree
    on_riserd "test ! -e $TREE/iscsi && targetcli restoreconfig"
    use_it
    on_riserd "targetcli clearconfig confirm=True; test ! -e $TREE/core/fileio_0/img"
    end_tree
    [ -z "$differs" ] || fail "the two trees differ"
}
