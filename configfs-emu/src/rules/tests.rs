use std::collections::BTreeMap;

use riser_admin_api::live::{LiveError, LiveLun, LiveOp, LiveRefused, LiveShare, LiveTarget};
use riser_admin_api::view::SessionView;
use rustix::io::Errno;

use super::*;
use crate::testing::{Fixture, TPG};
use crate::tree::{Access, Kind as _};
use crate::world::Session;

const OK: Result<(), Errno> = Ok(());
const INVAL: Result<(), Errno> = Err(Errno::INVAL);

/// Runs each line with a new tree, after the common setup.
fn check(setup: &dyn Fn() -> Fixture, lines: &[(&str, Result<(), Errno>)]) {
    for (line, result) in lines {
        let line = line.replace("TPG", TPG);
        assert_eq!(setup().try_line(&line), *result, "{line}");
    }
}

#[test]
fn directory_names_are_checked() {
    let setup = || {
        let mut fixture = Fixture::served();
        fixture.run("mkdir srpt\nmkdir srpt/0002:c903:00a1:b2c3\nmkdir srpt/0002:c903:00a1:b2c3/p");
        fixture
    };
    let srp = "srpt/0002:c903:00a1:b2c3/p";
    check(
        &setup,
        &[
            ("mkdir vhost", INVAL),
            ("mkdir loopback", INVAL),
            ("mkdir core/iblock_0", OK),
            ("mkdir core/rd_mcp_17", OK),
            ("mkdir core/pscsi_0", INVAL),
            ("mkdir core/user_0", INVAL),
            ("mkdir core/fileio", INVAL),
            ("mkdir core/fileio_x", INVAL),
            ("mkdir iscsi/iqn.2026-01.example:disk/tpgt_65536", INVAL),
            ("mkdir iscsi/iqn.2026-01.example:disk/tpg_2", INVAL),
            ("mkdir iscsi/iqn.2026-01.example:disk/tpgt_2", OK),
            ("mkdir TPG/np/127.0.0.1", INVAL),
            ("mkdir TPG/np/localhost:3260", INVAL),
            ("mkdir TPG/np/[::1]:3260", OK),
            ("mkdir TPG/np/[::0]:3260", OK),
            ("mkdir TPG/np/0.0.0.0:3260", OK),
            ("mkdir TPG/lun/lun1", INVAL),
            ("mkdir TPG/lun/lun_x", INVAL),
            ("mkdir TPG/lun/lun_1", OK),
            ("mkdir TPG/acls/iqn.2026-01.example:client/x", INVAL),
            ("mkdir TPG/acls/iqn.2026-01.example:client/lun_1", OK),
            // This port doesn't exist on this host.
            ("mkdir srpt/0002:c903:00a1:b2c4", INVAL),
            ("mkdir srpt/0x00000000000000000000ffff7f000001", OK),
        ],
    );
    for (name, result) in [
        ("np/127.0.0.1:5555", Err(Errno::NOSYS)),
        ("acls/0x00000000000000010002c90300a1b2c3", OK),
        ("acls/00000000000000010002c90300a1b2c3", OK),
        ("acls/0002:c903:00a1:b2c4", OK),
        ("acls/10.0.0.2", OK),
        ("acls/fe80:0000:0000:0000:5054:00ff:fe12:3456", OK),
        ("acls/iqn.2026-01.example:client", INVAL),
        ("acls/0x12", INVAL),
    ] {
        let line = format!("mkdir {srp}/{name}");
        assert_eq!(setup().try_line(&line), result, "{line}");
    }
}

/// CVE-2025-39998: device and group names must have a maximum length, and the buffer used to list
/// them must be large enough.
#[test]
fn cve_2025_39998_name_length_is_limited() {
    let long = |len: usize| "n".repeat(len);
    for (parent, most) in [
        ("core/fileio_0/", 255),
        ("core/alua/lu_gps/", 255),
        ("core/fileio_0/disk/alua/", 255),
        ("iscsi/iqn.2026-01.", 223 - "iqn.2026-01.".len()),
        ("TPG/acls/", 223),
    ] {
        let parent = parent.replace("TPG", TPG);
        let line = |len| format!("mkdir {parent}{}", long(len));
        assert_eq!(Fixture::served().try_line(&line(most)), OK, "{parent}");
        for len in [most + 1, 256, 1024, 70_000] {
            let result = Fixture::served().try_line(&line(len));
            assert!(result.is_err(), "{parent}, {len}");
            if len > 255 {
                assert_eq!(result, Err(Errno::NAMETOOLONG), "{parent}, {len}");
            }
        }
    }
    let link = format!("ln {TPG}/lun/lun_0/{} core/fileio_0/disk", long(256));
    assert_eq!(Fixture::served().try_line(&link), Err(Errno::NAMETOOLONG));
    // Use the maximum length for both names in the only file with two names per line.
    let mut fixture = Fixture::served();
    let (group, device) = (long(255), "d".repeat(255));
    fixture.run(&format!(
        "mkdir core/alua/lu_gps/{group}
             mkdir core/fileio_0/{device}
             echo core/fileio_0/{device}/alua_lu_gp {group}"
    ));
    let members = fixture.read(&format!("core/alua/lu_gps/{group}/members"));
    assert_eq!(members.unwrap(), format!("fileio_0/{device}\n"));
}

#[test]
fn portal_belongs_to_single_group() {
    let mut fixture = Fixture::served();
    fixture.run("mkdir iscsi/iqn.2026-01.example:disk/tpgt_2");
    let line = "mkdir iscsi/iqn.2026-01.example:disk/tpgt_2/np/127.0.0.1:3260";
    assert_eq!(fixture.try_line(line), INVAL);
}

#[test]
fn device_is_enabled_with_known_medium() {
    for (host, control, result) in [
        ("fileio_1", "fd_dev_size=4096", INVAL),
        ("fileio_1", "fd_dev_name=/srv/new", INVAL),
        ("fileio_1", "fd_dev_name=/srv/new,fd_dev_size=0", INVAL),
        ("fileio_1", "fd_dev_name=/srv/new,fd_dev_size=4096", OK),
        ("fileio_1", "fd_dev_name=/srv/new,fd_dev_size=4096,", OK),
        ("fileio_1", "unknown=1,fd_dev_name=/dev/sdz", OK),
        (
            "fileio_1",
            "fd_dev_name=/srv,fd_dev_size=4096",
            Err(Errno::ISDIR),
        ),
        (
            "fileio_1",
            "fd_dev_name=/no/x,fd_dev_size=4096",
            Err(Errno::NOENT),
        ),
        ("iblock_1", "readonly=1", INVAL),
        ("iblock_1", "udev_path=/dev/sdz,", OK),
        ("iblock_1", "udev_path=/srv/disk", Err(Errno::NOTBLK)),
        ("iblock_1", "udev_path=/dev/none", Err(Errno::NOENT)),
        ("rd_mcp_1", "rd_nullio=1", INVAL),
        ("rd_mcp_1", "rd_pages=16,rd_nullio=1", OK),
    ] {
        let mut fixture = Fixture::default();
        fixture.run(&format!("mkdir core/{host}\nmkdir core/{host}/d"));
        fixture.run(&format!("echo core/{host}/d/control {control}"));
        let enabled = fixture.try_line(&format!("echo core/{host}/d/enable 1"));
        assert_eq!(enabled, result, "{host} {control}");
        let expected = if result.is_ok() { "1\n" } else { "0\n" };
        assert_eq!(
            fixture.read(&format!("core/{host}/d/enable")).unwrap(),
            expected
        );
    }
    check(
        &Fixture::served,
        &[
            ("echo core/fileio_0/disk/enable 1", Err(Errno::EXIST)),
            ("echo core/fileio_0/disk/enable 0", INVAL),
            ("put core/fileio_0/disk/control fd_buffered_io=0", INVAL),
            ("put core/fileio_0/disk/control fd_dev_size=many", INVAL),
            ("put core/fileio_0/disk/control something", OK),
        ],
    );
}

#[test]
fn device_attributes_are_limited() {
    let setup = || {
        let mut fixture = Fixture::default();
        fixture.run(
            "mkdir core/fileio_0
             mkdir core/fileio_0/d
             put core/fileio_0/d/control fd_dev_name=/srv/disk,fd_dev_size=1048576",
        );
        fixture
    };
    let enabled = || {
        let mut fixture = setup();
        fixture.run("echo core/fileio_0/d/enable 1");
        fixture
    };
    check(
        &setup,
        &[(
            "echo core/fileio_0/d/attrib/emulate_tpu 1",
            Err(Errno::NODEV),
        )],
    );
    check(
        &enabled,
        &[
            ("echo core/fileio_0/d/attrib/emulate_tpu 1", OK),
            ("echo core/fileio_0/d/attrib/emulate_tpu 2", INVAL),
            ("echo core/fileio_0/d/attrib/emulate_dpo anything", OK),
            (
                "echo core/fileio_0/d/attrib/emulate_ua_intlck_ctrl 3",
                INVAL,
            ),
            (
                "echo core/fileio_0/d/attrib/emulate_rest_reord 1",
                Err(Errno::NOSYS),
            ),
            (
                "echo core/fileio_0/d/attrib/pi_prot_type 1",
                Err(Errno::NOSYS),
            ),
            ("echo core/fileio_0/d/attrib/pi_prot_type 4", INVAL),
            ("echo core/fileio_0/d/attrib/block_size 520", INVAL),
            ("echo core/fileio_0/d/attrib/block_size 4096", OK),
            ("echo core/fileio_0/d/attrib/queue_depth 0", INVAL),
            ("echo core/fileio_0/d/attrib/queue_depth 129", INVAL),
            ("echo core/fileio_0/d/attrib/optimal_sectors 16385", INVAL),
            (
                "echo core/fileio_0/d/attrib/max_write_same_len 4294967296",
                Err(Errno::RANGE),
            ),
            (
                "echo core/fileio_0/d/attrib/alua_support 0",
                Err(Errno::NOSYS),
            ),
            (
                "echo core/fileio_0/d/attrib/hw_block_size 512",
                Err(Errno::ACCESS),
            ),
            ("echo core/fileio_0/d/wwn/vendor_id RISER-01", OK),
            (
                "echo core/fileio_0/d/wwn/vendor_id RISER-012",
                Err(Errno::OVERFLOW),
            ),
            ("echo core/fileio_0/d/wwn/product_id T\u{e4}st", INVAL),
            (
                "echo core/fileio_0/d/wwn/company_id 0x1000000",
                Err(Errno::OVERFLOW),
            ),
            ("echo core/fileio_0/d/wwn/company_id 0x1405", OK),
            ("echo core/fileio_0/d/udev_path /srv/disk", OK),
            ("echo core/fileio_0/d/alua_lu_gp none", Err(Errno::NODEV)),
            ("echo core/fileio_0/d/alua_lu_gp default_lu_gp", OK),
            ("echo core/fileio_0/d/lba_map 64 1\\n0 63 1:O 2:A", OK),
            ("echo core/fileio_0/d/lba_map 64", INVAL),
        ],
    );
    let long = format!(
        "echo core/fileio_0/d/wwn/vpd_unit_serial {}",
        "x".repeat(254)
    );
    assert_eq!(setup().try_line(&long), Err(Errno::OVERFLOW));
}

#[test]
fn exported_device_attributes_are_locked() {
    check(
        &Fixture::served,
        &[
            ("echo core/fileio_0/disk/wwn/vpd_unit_serial other", INVAL),
            ("echo core/fileio_0/disk/wwn/product_id other", INVAL),
            ("echo core/fileio_0/disk/attrib/block_size 4096", INVAL),
            ("echo core/fileio_0/disk/attrib/emulate_tas 0", INVAL),
            (
                "echo core/fileio_0/disk/attrib/emulate_model_alias 1",
                INVAL,
            ),
            ("echo core/fileio_0/disk/attrib/emulate_write_cache 1", OK),
            ("echo dbroot /etc/target", INVAL),
        ],
    );
    let mut fresh = Fixture::default();
    assert_eq!(fresh.try_line("echo dbroot /nowhere"), INVAL);
    fresh.run("echo dbroot /etc/target");
    assert_eq!(fresh.read("dbroot"), Ok("/etc/target\n".into()));
}

#[test]
fn files_contain_rtslib_values() {
    let mut fixture = Fixture::served();
    let mut says = |path: &str| fixture.read(path).unwrap();
    assert_eq!(
        says("core/fileio_0/disk/info"),
        "Status: ACTIVATED  Max Queue Depth: 0  SectorSize: 512  HwMaxSectors: 16384\n        TCM \
         FILEIO ID: 0        File: /srv/disk  Size: 1048576  Mode: O_DSYNC Async: 0\n"
    );
    assert_eq!(
        says("core/fileio_0/hba_info"),
        "HBA Index: 1 plugin: fileio version: v5.0\n"
    );
    assert_eq!(
        says("core/fileio_0/disk/wwn/vpd_unit_serial"),
        "T10 VPD Unit Serial Number: 5a0e1b2c-0000-4000-8000-0123456789ab\n"
    );
    assert_eq!(says("core/fileio_0/disk/wwn/product_id"), "FILEIO\n");
    assert_eq!(says("core/fileio_0/disk/alias"), "");
    assert_eq!(
        says(&format!("{TPG}/lun/lun_0/alua_tg_pt_gp")),
        "TG Port Alias: default_tg_pt_gp\nTG Port Group ID: 0\nTG Port Primary Access State: \
         Active/Optimized\nTG Port Primary Access Status: None\nTG Port Secondary Access State: \
         None\nTG Port Secondary Access Status: None\n"
    );
    assert_eq!(
        says("core/fileio_0/disk/alua/default_tg_pt_gp/members"),
        "iSCSI/iqn.2026-01.example:disk/tpgt_1/lun_0\n"
    );
    assert_eq!(
        says("core/alua/lu_gps/default_lu_gp/members"),
        "fileio_0/disk\n"
    );
    assert_eq!(says(&format!("{TPG}/rtpi")), "0x1\n");
    assert_eq!(says(&format!("{TPG}/param/AuthMethod")), "CHAP,None\n");
    assert_eq!(
        says("core/fileio_0/disk/pr/res_type"),
        "SPC3_PERSISTENT_RESERVATIONS\n"
    );
    fixture.run(
        "mkdir core/rd_mcp_3
         mkdir core/rd_mcp_3/r
         echo core/rd_mcp_3/r/control rd_pages=2048
         echo core/rd_mcp_3/r/enable 1
         mkdir core/iblock_4
         mkdir core/iblock_4/b
         echo core/iblock_4/b/control udev_path=/dev/sdz
         echo core/iblock_4/b/enable 1",
    );
    let ram = fixture.read("core/rd_mcp_3/r/info").unwrap();
    assert!(
        ram.contains("PAGES/PAGE_SIZE: 2048*4096  SG_table_count: 2  nullio: 0"),
        "{ram}"
    );
    let block = fixture.read("core/iblock_4/b/info").unwrap();
    assert!(
        block.contains("iBlock device: sdz  UDEV PATH: /dev/sdz  readonly: 0\n"),
        "{block}"
    );
    assert!(
        block.contains("Major: 8 Minor: 400  CLAIMED: IBLOCK\n"),
        "{block}"
    );
}

#[test]
fn links_follow_lio_rules() {
    let setup = || {
        let mut fixture = Fixture::served();
        fixture.run(&format!(
            "mkdir core/rd_mcp_0
             mkdir core/rd_mcp_0/raw
             mkdir {TPG}/lun/lun_1
             mkdir {TPG}/acls/iqn.2026-01.example:client/lun_1
             mkdir iscsi/iqn.2026-01.example:disk/tpgt_2
             mkdir iscsi/iqn.2026-01.example:disk/tpgt_2/lun/lun_0
             ln iscsi/iqn.2026-01.example:disk/tpgt_2/lun/lun_0/x /x/target/core/fileio_0/disk"
        ));
        fixture
    };
    check(
        &setup,
        &[
            ("ln TPG/lun/lun_1/x ../../../../../core/fileio_0/disk", OK),
            (
                "ln TPG/lun/lun_1/x ../../../../../core/rd_mcp_0/raw",
                Err(Errno::NODEV),
            ),
            (
                "ln TPG/lun/lun_1/x ../../../../../core/rd_mcp_0",
                Err(Errno::FAULT),
            ),
            (
                "ln TPG/lun/lun_0/x ../../../../../core/fileio_0/disk",
                Err(Errno::EXIST),
            ),
            (
                "ln TPG/acls/iqn.2026-01.example:client/lun_1/x ../../../lun/lun_0",
                OK,
            ),
            (
                "ln TPG/acls/iqn.2026-01.example:client/lun_1/x ../../../lun/lun_1",
                INVAL,
            ),
            (
                "ln TPG/acls/iqn.2026-01.example:client/lun_1/x ../../../lun",
                Err(Errno::FAULT),
            ),
            (
                "ln TPG/acls/iqn.2026-01.example:client/lun_0/x ../../../lun/lun_0",
                INVAL,
            ),
            (
                "ln TPG/acls/iqn.2026-01.example:client/lun_1/x ../../../../tpgt_2/lun/lun_0",
                INVAL,
            ),
        ],
    );
    let mut fixture = setup();
    let path = format!("{TPG}/lun/lun_1/alua_tg_pt_gp");
    assert_eq!(fixture.read(&path), Err(Errno::NODEV));
    assert_eq!(
        fixture.try_line(&format!("echo {path} x")),
        Err(Errno::NODEV)
    );
}

#[test]
fn portal_groups_have_their_limits() {
    check(
        &Fixture::served,
        &[
            ("echo TPG/enable 2", INVAL),
            ("echo TPG/rtpi 7", INVAL),
            ("echo TPG/attrib/login_timeout 4", INVAL),
            ("echo TPG/attrib/login_timeout 30", OK),
            ("echo TPG/attrib/default_cmdsn_depth 513", INVAL),
            ("echo TPG/attrib/fabric_prot_type 2", INVAL),
            ("echo TPG/attrib/authentication yes", INVAL),
            ("echo TPG/np/127.0.0.1:3260/iser 2", INVAL),
            ("echo TPG/np/127.0.0.1:3260/iser 1", OK),
            ("echo TPG/np/127.0.0.1:3260/cxgbit 1", INVAL),
            ("echo TPG/np/127.0.0.1:3260/cxgbit 0", OK),
            ("echo TPG/param/MaxBurstLength 511", INVAL),
            ("echo TPG/param/InitialR2T no", INVAL),
            ("echo TPG/param/HeaderDigest CRC32C,None", OK),
            ("echo TPG/param/HeaderDigest MD5", INVAL),
            ("echo TPG/param/ErrorRecoveryLevel 3", INVAL),
            ("echo TPG/param/IFMarkInt 2048~65535", OK),
            (
                "echo TPG/acls/iqn.2026-01.example:client/cmdsn_depth 513",
                INVAL,
            ),
            (
                "echo TPG/acls/iqn.2026-01.example:client/attrib/nopin_timeout 2",
                INVAL,
            ),
            (
                "echo TPG/acls/iqn.2026-01.example:client/attrib/nopin_timeout 0",
                OK,
            ),
            (
                "echo TPG/acls/iqn.2026-01.example:client/attrib/authentication -2",
                INVAL,
            ),
            (
                "echo TPG/acls/iqn.2026-01.example:client/attrib/authentication -1",
                OK,
            ),
            (
                "echo TPG/acls/iqn.2026-01.example:client/lun_0/write_protect 2",
                INVAL,
            ),
            ("echo iscsi/discovery_auth/enforce_discovery_auth 2", INVAL),
            ("echo iscsi/cpus_allowed_list 0-3,5", OK),
            ("echo iscsi/cpus_allowed_list 3-0", INVAL),
        ],
    );
}

#[test]
fn settings_update_related_settings() {
    let mut fixture = Fixture::served();
    let attrib = format!("{TPG}/attrib");
    fixture.run(&format!(
        "echo {attrib}/generate_node_acls 1\necho {attrib}/cache_dynamic_acls 0"
    ));
    assert_eq!(
        fixture
            .read(&format!("{attrib}/cache_dynamic_acls"))
            .unwrap(),
        "1\n"
    );
    fixture.run(&format!("echo {attrib}/authentication 1"));
    assert_eq!(
        fixture.read(&format!("{TPG}/param/AuthMethod")).unwrap(),
        "CHAP\n"
    );
    fixture.run(&format!(
        "echo {attrib}/prod_mode_write_protect 1
         echo {attrib}/default_cmdsn_depth 8
         mkdir {TPG}/acls/iqn.2026-01.example:b
         mkdir {TPG}/acls/iqn.2026-01.example:b/lun_0"
    ));
    let acl = format!("{TPG}/acls/iqn.2026-01.example:b");
    assert_eq!(fixture.read(&format!("{acl}/cmdsn_depth")).unwrap(), "8\n");
    fixture.run(&format!("echo {acl}/lun_0/write_protect 1"));
    assert_eq!(
        fixture.read(&format!("{acl}/lun_0/write_protect")).unwrap(),
        ""
    );
    fixture.run(&format!("ln {acl}/lun_0/x ../../../lun/lun_0"));
    assert_eq!(
        fixture.read(&format!("{acl}/lun_0/write_protect")).unwrap(),
        "1\n"
    );
    let auth = format!("{acl}/auth");
    assert_eq!(
        fixture
            .read(&format!("{auth}/authenticate_target"))
            .unwrap(),
        "0\n"
    );
    fixture.run(&format!(
        "put {auth}/userid_mutual u\nput {auth}/password_mutual p"
    ));
    assert_eq!(
        fixture
            .read(&format!("{auth}/authenticate_target"))
            .unwrap(),
        "1\n"
    );
    fixture.run(&format!("put {auth}/password_mutual NULL"));
    assert_eq!(
        fixture
            .read(&format!("{auth}/authenticate_target"))
            .unwrap(),
        "0\n"
    );
}

#[test]
fn groups_of_ports_have_numbers_and_states() {
    let group = "core/fileio_0/disk/alua/ap1";
    let setup = || {
        let mut fixture = Fixture::served();
        fixture.run("mkdir core/fileio_0/disk/alua/ap1");
        fixture
    };
    let mut fixture = setup();
    assert_eq!(fixture.read(&format!("{group}/tg_pt_gp_id")).unwrap(), "");
    assert_eq!(
        fixture.try_line(&format!("echo {group}/alua_access_state 1")),
        INVAL
    );
    fixture.run(&format!("echo {group}/tg_pt_gp_id 0"));
    assert_eq!(
        fixture.read(&format!("{group}/tg_pt_gp_id")).unwrap(),
        "1\n"
    );
    assert_eq!(
        fixture.try_line(&format!("echo {group}/tg_pt_gp_id 3")),
        INVAL
    );
    for (file, text, result) in [
        ("alua_access_state", "2", OK),
        ("alua_access_state", "4", INVAL),
        ("alua_access_state", "15", INVAL),
        ("alua_access_status", "3", INVAL),
        ("alua_access_type", "4", INVAL),
        ("alua_access_type", "2", OK),
        // If access is implicit, only the target's administrator is allowed to do this.
        ("alua_access_state", "1", INVAL),
        ("alua_support_offline", "2", INVAL),
        ("nonop_delay_msecs", "10001", INVAL),
        ("preferred", "1", OK),
    ] {
        let line = format!("echo {group}/{file} {text}");
        assert_eq!(fixture.try_line(&line), result, "{line}");
    }
    assert_eq!(
        fixture
            .read(&format!("{group}/alua_access_status"))
            .unwrap(),
        "Altered by Implicit ALUA\n"
    );
    fixture.run(&format!("echo {TPG}/lun/lun_0/alua_tg_pt_gp ap1"));
    let members = fixture
        .read(&format!("{TPG}/lun/lun_0/alua_tg_pt_gp"))
        .unwrap();
    assert!(
        members.starts_with("TG Port Alias: ap1\nTG Port Group ID: 1\n"),
        "{members}"
    );
    // If a group is removed, its LUNs must be moved to the default group.
    fixture.run(&format!("rmdir {group}"));
    let members = fixture
        .read(&format!("{TPG}/lun/lun_0/alua_tg_pt_gp"))
        .unwrap();
    assert!(
        members.starts_with("TG Port Alias: default_tg_pt_gp\n"),
        "{members}"
    );
}

#[test]
fn srp_ports_have_their_limits() {
    let setup = || {
        let mut fixture = Fixture::default();
        fixture.run("mkdir srpt\nmkdir srpt/0002:c903:00a1:b2c3\nmkdir srpt/0002:c903:00a1:b2c3/p");
        fixture
    };
    check(
        &setup,
        &[
            ("echo srpt/discovery_auth/rdma_cm_port 5555", OK),
            (
                "echo srpt/discovery_auth/rdma_cm_port 65536",
                Err(Errno::RANGE),
            ),
            (
                "echo srpt/0002:c903:00a1:b2c3/p/attrib/srp_max_rdma_size 65535",
                INVAL,
            ),
            (
                "echo srpt/0002:c903:00a1:b2c3/p/attrib/srp_max_rsp_size 1025",
                INVAL,
            ),
            ("echo srpt/0002:c903:00a1:b2c3/p/attrib/use_srq 1", OK),
            ("echo srpt/0002:c903:00a1:b2c3/p/enable 1", OK),
            (
                "echo srpt/0002:c903:00a1:b2c3/param/cmd_completion_affinity -3",
                INVAL,
            ),
        ],
    );
}

#[test]
fn initiator_files_describe_session() {
    let mut fixture = Fixture::served();
    let acl = format!("{TPG}/acls/iqn.2026-01.example:client");
    assert_eq!(
        fixture.read(&format!("{acl}/info")).unwrap(),
        "No active iSCSI Session for Initiator Endpoint: iqn.2026-01.example:client\n"
    );
    let session = |initiator: &str| Session {
        target: "iqn.2026-01.example:disk".to_owned(),
        initiator: initiator.to_owned(),
        isid: "00023d000001".to_owned(),
        id: 4,
        addresses: vec!["10.0.0.2:49152".to_owned()],
        is_live: true,
        terms: [("InitialR2T", "No"), ("MaxBurstLength", "262144")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into(),
    };
    fixture.world.sessions = vec![
        session("iqn.2026-01.example:client"),
        session("iqn.other:x"),
    ];
    let info = fixture.read(&format!("{acl}/info")).unwrap();
    for part in [
        "InitiatorName: iqn.2026-01.example:client\n",
        "LIO Session ID: 4   ISID: 0x00023d000001  TSIH: 4  SessionType: Normal\n",
        "Session State: TARG_SESS_STATE_LOGGED_IN\n",
        "CID: 0  Connection State: TARG_CONN_STATE_LOGGED_IN\n   Address 10.0.0.2:49152 TCP",
    ] {
        assert!(info.contains(part), "{part}\n{info}");
    }
    assert_eq!(
        fixture.read(&format!("{acl}/param/InitialR2T")).unwrap(),
        "0\n"
    );
    assert_eq!(
        fixture
            .read(&format!("{acl}/param/MaxBurstLength"))
            .unwrap(),
        "262144\n"
    );
    assert_eq!(
        fixture.read(&format!("{TPG}/dynamic_sessions")).unwrap(),
        "iqn.other:x\n"
    );
}

/// Files in a directory must have unique names, and there must not be more files than supported by
/// the inode format.
#[test]
fn tables_are_sound() {
    let mut fixture = Fixture::served();
    fixture.run(
        "mkdir srpt\nmkdir srpt/0002:c903:00a1:b2c3\nmkdir srpt/0002:c903:00a1:b2c3/p
         mkdir srpt/0002:c903:00a1:b2c3/p/acls/10.0.0.2",
    );
    let mut dirs = vec![fixture.tree.find("target").unwrap()];
    while let Some(id) = dirs.pop() {
        let attrs = fixture.tree.dir(id).kind.attrs();
        let names: std::collections::BTreeSet<_> = attrs.iter().map(|a| a.name).collect();
        assert_eq!(names.len(), attrs.len(), "{}", fixture.tree.path(id));
        assert!(attrs.len() < 255);
        for (i, attr) in attrs.iter().enumerate() {
            assert_eq!(
                attr.access == Access::ReadOnly,
                matches!(attr.store, Store::Never),
                "{}",
                attr.name
            );
            if attr.access != Access::WriteOnly {
                let file = crate::tree::Ino::of_attr(id, i);
                let said = fixture.tree.read(file, &fixture.world);
                let path = format!("{}/{}", fixture.tree.path(id), attr.name);
                let is_of_session = path.contains("/scsi_att_intr_port/");
                assert!(said.is_ok() || is_of_session, "{path}");
            }
        }
        dirs.extend(fixture.tree.subdirs(id).map(|(_, child)| child));
    }
}

/// Creates the counters of a unit that was used by the initiator in [`Fixture::served`].
fn used(target: &str, lun: u16) -> LiveLun {
    let op = |commands, bytes| LiveOp {
        commands,
        bytes,
        ..LiveOp::default()
    };
    let share = LiveShare {
        commands: 5,
        read: 4 << 20,
        written: 2 << 20,
    };
    LiveLun {
        target: target.to_owned(),
        lun,
        ops: BTreeMap::from([
            ("read".to_owned(), op(4, 5 << 20)),
            ("write".to_owned(), op(3, (3 << 20) - 1)),
        ]),
        initiators: BTreeMap::from([
            ("iqn.2026-01.example:client".to_owned(), share),
            ("iqn.2026-01.example:second".to_owned(), share),
        ]),
        resets: 2,
        aborts: 3,
        ..LiveLun::default()
    }
}

#[test]
fn unit_and_port_statistics_match_daemon() {
    let mut fixture = Fixture::served();
    let lu = "core/fileio_0/disk/statistics/scsi_lu";
    assert_eq!(fixture.read(&format!("{lu}/num_cmds")), Ok("0\n".into()));
    let name = "iqn.2026-01.example:disk";
    fixture.world.live.luns = vec![used(name, 0), used(name, 1), used("other", 0)];
    let port = format!("{TPG}/lun/lun_0/statistics");
    let mapped = format!("{TPG}/acls/iqn.2026-01.example:client/lun_0/statistics");
    for (path, expected) in [
        (format!("{lu}/inst"), "2"),
        (format!("{lu}/num_cmds"), "7"),
        (format!("{lu}/read_mbytes"), "5"),
        (format!("{lu}/write_mbytes"), "2"),
        (format!("{lu}/resets"), "2"),
        (format!("{lu}/creation_time"), "1234"),
        (
            format!("{lu}/lu_name"),
            "5a0e1b2c-0000-4000-8000-0123456789ab",
        ),
        (format!("{lu}/vend"), "LIO-ORG "),
        (format!("{lu}/prod"), "FILEIO          "),
        (format!("{port}/scsi_tgt_port/in_cmds"), "7"),
        (format!("{port}/scsi_tgt_port/read_mbytes"), "5"),
        (format!("{port}/scsi_tgt_port/name"), "iSCSIPort#1"),
        (
            format!("{port}/scsi_tgt_port/port_index"),
            "iqn.2026-01.example:disk+t+1",
        ),
        (format!("{port}/scsi_port/role"), "Device1"),
        (
            format!("{port}/scsi_transport/dev_name"),
            "iqn.2026-01.example:disk+5a0e1b2c-0000-4000-8000-0123456789ab",
        ),
        (
            "core/fileio_0/disk/statistics/scsi_dev/ports".to_owned(),
            "1",
        ),
        (
            "core/fileio_0/disk/statistics/scsi_tgt_dev/aborts_complete".to_owned(),
            "3",
        ),
        (
            format!("{mapped}/scsi_auth_intr/intr_name"),
            "iqn.2026-01.example:client",
        ),
        (format!("{mapped}/scsi_auth_intr/num_cmds"), "5"),
        (format!("{mapped}/scsi_auth_intr/write_mbytes"), "2"),
        (format!("{mapped}/scsi_auth_intr/creation_time"), "1234"),
    ] {
        assert_eq!(fixture.read(&path), Ok(format!("{expected}\n")), "{path}");
    }
    let ident = format!("{mapped}/scsi_att_intr_port/port_ident");
    assert_eq!(fixture.read(&ident), Err(Errno::NODEV));
    fixture.world.sessions = vec![Session {
        target: name.to_owned(),
        initiator: "iqn.2026-01.example:client".to_owned(),
        isid: "00023d000001".to_owned(),
        id: 3,
        ..Session::default()
    }];
    let ident_text = "iqn.2026-01.example:client+i+00023d000001\n";
    assert_eq!(fixture.read(&ident), Ok(ident_text.into()));
    // If an initiator uses a different number for a LUN, it's still the same LUN, even if this
    // number is also used by another LUN.
    fixture.run(&format!(
        "mkdir {TPG}/acls/iqn.2026-01.example:second
         mkdir {TPG}/acls/iqn.2026-01.example:second/lun_1
         ln {TPG}/acls/iqn.2026-01.example:second/lun_1/x ../../../lun/lun_0"
    ));
    let commands = format!("{port}/scsi_tgt_port/in_cmds");
    assert_eq!(fixture.read(&commands), Ok("7\n".into()));
    // Without a LUN, there are no counters.
    fixture.run(&format!("rm {TPG}/acls/iqn.2026-01.example:second/lun_1/x"));
    let other =
        format!("{TPG}/acls/iqn.2026-01.example:second/lun_1/statistics/scsi_auth_intr/num_cmds");
    assert_eq!(fixture.read(&other), Err(Errno::NODEV));
}

#[test]
fn target_and_session_statistics_match_daemon() {
    let mut fixture = Fixture::served();
    let target = "iscsi/iqn.2026-01.example:disk/fabric_statistics";
    let session =
        format!("{TPG}/acls/iqn.2026-01.example:client/fabric_statistics/iscsi_sess_stats");
    let says = |fixture: &mut Fixture, lines: &[(String, &str)]| {
        for (path, expected) in lines {
            assert_eq!(fixture.read(path).as_deref(), Ok(*expected), "{path}");
        }
    };
    says(
        &mut fixture,
        &[
            (format!("{target}/iscsi_instance/portals"), "1\n"),
            (format!("{target}/iscsi_instance/fail_rem_name"), "None\n"),
            (
                format!("{target}/iscsi_tgt_attr/fail_intr_addr"),
                "(einval)\n",
            ),
            (format!("{target}/iscsi_tgt_attr/last_fail_time"), "0\n"),
            (format!("{session}/inst"), "0\n"),
            (format!("{session}/cmd_pdus"), ""),
        ],
    );
    let name = "iqn.2026-01.example:disk";
    let counts = |names: &[(&str, u64)]| {
        let counts = names.iter().map(|(name, n)| ((*name).to_owned(), *n));
        counts.collect::<BTreeMap<_, _>>()
    };
    fixture.world.live.targets = vec![LiveTarget {
        target: name.to_owned(),
        logins: 9,
        refused: counts(&[
            ("authentication_failure", 2),
            ("moved_permanently", 1),
            ("out_of_resources", 4),
        ]),
        last_refused: Some(LiveRefused {
            answer: "authentication_failure".to_owned(),
            initiator: "iqn.2026-01.example:mallory".to_owned(),
            address: "10.0.0.9".to_owned(),
            ago: 2.0,
        }),
        events: counts(&[("logout", 6), ("partial_logout", 1), ("timeout", 5)]),
        last_error: Some(LiveError {
            event: "timeout".to_owned(),
            initiator: "iqn.2026-01.example:client".to_owned(),
        }),
    }];
    fixture.world.sessions = vec![Session {
        target: name.to_owned(),
        initiator: "iqn.2026-01.example:client".to_owned(),
        id: 7,
        ..Session::default()
    }];
    let connection = SessionView {
        target: name.to_owned(),
        initiator: "iqn.2026-01.example:client,0x00023d000001".to_owned(),
        commands: 10,
        in_flight: 1,
        read: 4096,
        written: 512,
        ..SessionView::default()
    };
    fixture.world.live.sessions = vec![connection.clone(), connection];
    says(
        &mut fixture,
        &[
            (format!("{target}/iscsi_instance/sessions"), "1\n"),
            (format!("{target}/iscsi_instance/fail_sess"), "5\n"),
            (format!("{target}/iscsi_instance/fail_type"), "2\n"),
            (format!("{target}/iscsi_sess_err/cxn_errors"), "5\n"),
            (format!("{target}/iscsi_tgt_attr/login_fails"), "7\n"),
            (format!("{target}/iscsi_tgt_attr/last_fail_type"), "5\n"),
            (format!("{target}/iscsi_tgt_attr/last_fail_time"), "1034\n"),
            (format!("{target}/iscsi_login_stats/accepts"), "9\n"),
            (format!("{target}/iscsi_login_stats/redirects"), "1\n"),
            (format!("{target}/iscsi_login_stats/other_fails"), "4\n"),
            (format!("{target}/iscsi_logout_stats/normal_logouts"), "6\n"),
            (format!("{session}/indx"), "7\n"),
            (format!("{session}/cmd_pdus"), "22\n"),
            (format!("{session}/rsp_pdus"), "20\n"),
            (format!("{session}/txdata_octs"), "8192\n"),
        ],
    );
}

#[test]
fn srp_initiators_match_all_name_formats() {
    let initiator = "0000000000000001:0002c90300a1b2c3";
    let session = Session {
        initiator: initiator.to_owned(),
        addresses: vec!["10.0.0.2:49152".to_owned()],
        ..Session::default()
    };
    let sessions = [session];
    for (entry, is_it) in [
        ("0x00000000000000010002c90300a1b2c3", true),
        ("00000000000000010002c90300a1b2c3", true),
        ("00000000000000020002c90300a1b2c3", false),
        ("0002:c903:00a1:b2c3", true),
        ("0002:c903:00a1:b2c4", false),
        ("10.0.0.2", true),
        ("10.0.0.3", false),
    ] {
        assert_eq!(
            session::is_named(entry, initiator, &sessions),
            is_it,
            "{entry}"
        );
    }
}
