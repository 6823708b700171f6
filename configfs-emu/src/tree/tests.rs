use rustix::io::Errno;

use super::*;
use crate::rules::Tree;
use crate::testing::{Fixture, TPG};

#[test]
fn new_tree_matches_kernel() {
    let mut fixture = Fixture::default();
    let shell = fixture.shell();
    assert_eq!(shell.ls(""), ["version", "dbroot", "core"]);
    assert_eq!(shell.ls("core"), ["alua"]);
    assert_eq!(shell.ls("core/alua/lu_gps"), ["default_lu_gp"]);
    assert_eq!(
        shell.read("core/alua/lu_gps/default_lu_gp/lu_gp_id"),
        Ok("0\n".into())
    );
    let meta = shell.tree.meta(shell.at("dbroot").unwrap()).unwrap();
    assert_eq!(
        (meta.kind, meta.mode, meta.size),
        (EntryKind::File, 0o644, 4096)
    );
    let meta = shell.tree.meta(shell.at("core").unwrap()).unwrap();
    assert_eq!(
        (meta.kind, meta.mode, meta.nlink),
        (EntryKind::Dir, 0o755, 3)
    );
}

/// Operations that configfs itself must reject, using a served tree.
#[test]
fn configfs_refuses_with_its_error_numbers() {
    let client = format!("{TPG}/acls/iqn.2026-01.example:client");
    for (line, errno) in [
        // A file or directory with this name already exists.
        ("mkdir iscsi".to_owned(), Errno::EXIST),
        ("mkdir version".to_owned(), Errno::EXIST),
        (
            format!("ln {TPG}/lun/lun_0/a ../../../../../core"),
            Errno::EXIST,
        ),
        // The file doesn't exist.
        ("rmdir srpt".to_owned(), Errno::NOENT),
        ("echo core/fileio_9/x/enable 1".to_owned(), Errno::NOENT),
        // Directories can't be created here.
        ("mkdir core/alua/x".to_owned(), Errno::PERM),
        (format!("mkdir {TPG}/x"), Errno::PERM),
        ("mkdir core/fileio_0/disk/attrib/x".to_owned(), Errno::PERM),
        ("mkdir version/x".to_owned(), Errno::NOTDIR),
        (
            "mkdir core/fileio_0/disk/statistics/x".to_owned(),
            Errno::NOSYS,
        ),
        // These were created together with another directory.
        ("rmdir core".to_owned(), Errno::PERM),
        (
            "rmdir core/alua/lu_gps/default_lu_gp".to_owned(),
            Errno::PERM,
        ),
        (format!("rmdir {TPG}/np"), Errno::PERM),
        // The directory is not empty, or there is a link to it.
        ("rmdir core/fileio_0".to_owned(), Errno::NOTEMPTY),
        ("rmdir core/fileio_0/disk".to_owned(), Errno::BUSY),
        (format!("rmdir {TPG}"), Errno::NOTEMPTY),
        (format!("rmdir {TPG}/lun/lun_0"), Errno::BUSY),
        (format!("rmdir {client}"), Errno::NOTEMPTY),
        (format!("rmdir {client}/lun_0"), Errno::NOTEMPTY),
        // This is not a directory, not a link, or has the wrong type.
        ("rmdir version".to_owned(), Errno::NOTDIR),
        ("rm version".to_owned(), Errno::PERM),
        ("rm core".to_owned(), Errno::ISDIR),
        ("ln x core".to_owned(), Errno::PERM),
        (format!("ln {TPG}/np/x ../../lun/lun_0"), Errno::PERM),
        (format!("ln {TPG}/lun/lun_0/c /etc/passwd"), Errno::PERM),
        (
            format!("ln {TPG}/lun/lun_0/c /sys/kernel/config/target/core/x"),
            Errno::NOENT,
        ),
        (
            format!("ln {TPG}/lun/lun_0/c ../../../../../../../.."),
            Errno::PERM,
        ),
        // Files that are read-only or write-only.
        ("echo version x".to_owned(), Errno::ACCESS),
        ("echo core/fileio_0/hba_info x".to_owned(), Errno::ACCESS),
    ] {
        let mut fixture = Fixture::served();
        assert_eq!(fixture.try_line(&line), Err(errno), "{line}");
    }
    let mut fixture = Fixture::served();
    assert_eq!(
        fixture.read("core/fileio_0/disk/control"),
        Err(Errno::ACCESS)
    );
    assert_eq!(fixture.read("core"), Err(Errno::ISDIR));
}

#[test]
fn link_text_is_relative_to_root() {
    let mut fixture = Fixture::served();
    let shell = fixture.shell();
    assert_eq!(
        shell.readlink(&format!("{TPG}/lun/lun_0/a")),
        Ok("../../../../../../target/core/fileio_0/disk".into())
    );
    assert_eq!(
        shell.readlink(&format!("{TPG}/acls/iqn.2026-01.example:client/lun_0/b")),
        Ok(format!("../../../../../../../target/{TPG}/lun/lun_0"))
    );
    assert_eq!(shell.readlink("core"), Err(Errno::INVAL));
}

#[test]
fn served_tree_can_be_removed() {
    let mut fixture = Fixture::served();
    let client = format!("{TPG}/acls/iqn.2026-01.example:client");
    fixture.run(&format!(
        "echo {TPG}/enable 0
         rm {client}/lun_0/b
         rmdir {client}/lun_0
         rmdir {client}
         rm {TPG}/lun/lun_0/a
         rmdir {TPG}/lun/lun_0
         rmdir {TPG}/np/127.0.0.1:3260
         rmdir {TPG}
         rmdir iscsi/iqn.2026-01.example:disk
         rmdir iscsi
         rmdir core/fileio_0/disk
         rmdir core/fileio_0"
    ));
    let fresh = Tree::new();
    assert_eq!(fixture.shell().ls(""), ["version", "dbroot", "core"]);
    assert_eq!(fixture.tree.nodes.len(), fresh.nodes.len());
}

#[test]
fn write_is_single_value_within_page() {
    let mut fixture = Fixture::served();
    let file = fixture.shell().at("core/fileio_0/disk/alias").unwrap();
    let mut write = |data: &[u8]| fixture.tree.write(file, data, &fixture.world);
    assert_eq!(write(b"name\0rest"), Ok(9));
    assert_eq!(write(&[b'x'; 9000]), Err(Errno::INVAL));
    assert_eq!(write(b"\xff\xfe"), Err(Errno::INVAL));
    assert_eq!(
        fixture.read("core/fileio_0/disk/alias"),
        Ok("name\n".into())
    );
    let file = fixture
        .shell()
        .at("core/fileio_0/disk/attrib/emulate_dpo")
        .unwrap();
    let written = fixture.tree.write(file, &[b'x'; 9000], &fixture.world);
    assert_eq!(written, Ok(MAX_WRITE));
}

#[test]
fn clone_does_not_see_changes() {
    let mut fixture = Fixture::served();
    let before = fixture.tree.clone();
    fixture.run(&format!("echo {TPG}/enable 0\nmkdir {TPG}/lun/lun_1"));
    let tpg = before.find(&format!("target/{TPG}")).unwrap();
    assert_eq!(before.value(tpg, "enable"), "1");
    assert!(before.find(&format!("target/{TPG}/lun/lun_1")).is_none());
}

#[test]
fn removed_inode_is_not_reused() {
    let mut fixture = Fixture::default();
    fixture.run("mkdir core/rd_mcp_0\nmkdir core/rd_mcp_0/r");
    let dir = fixture.shell().at("core/rd_mcp_0/r").unwrap();
    let file = fixture
        .shell()
        .at("core/rd_mcp_0/r/attrib/emulate_tas")
        .unwrap();
    fixture.run("rmdir core/rd_mcp_0/r\nmkdir core/rd_mcp_0/r");
    assert_eq!(fixture.tree.meta(dir), Err(Errno::NOENT));
    assert_eq!(fixture.tree.meta(file), Err(Errno::NOENT));
    assert_eq!(fixture.tree.read(file, &fixture.world), Err(Errno::NOENT));
}
