//! An in-memory world, and trees to be used in tests.

use std::net::IpAddr;
use std::time::Duration;

use riser_admin_api::live::Live;
use rustix::io::Errno;

use crate::rules::{Shell, Tree};
use crate::world::{BlockDevice, Medium, Session, World};

/// A host with a file, a disk, a directory and SRP target ports.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fake {
    pub(crate) sessions: Vec<Session>,
    pub(crate) live: Live,
}

impl World for Fake {
    fn medium(&self, path: &str) -> Medium {
        match path {
            "/srv/disk" => Medium::File { size: 1 << 20 },
            "/dev/sdz" => Medium::Device(BlockDevice {
                size: 1 << 30,
                block_size: 4096,
                name: "sdz".to_owned(),
                major: 8,
                minor: 400,
            }),
            "/srv" | "/etc/target" => Medium::Directory,
            path if path.starts_with("/srv/") => Medium::Vacant,
            _ => Medium::None,
        }
    }

    fn port_addresses(&self, port: &str) -> Vec<IpAddr> {
        match port {
            "0002:c903:00a1:b2c3" => vec!["10.0.0.1".parse().unwrap()],
            "0x00000000000000000000ffff7f000001" => vec!["127.0.0.1".parse().unwrap()],
            _ => Vec::new(),
        }
    }

    fn sessions(&self) -> Vec<Session> {
        self.sessions.clone()
    }

    fn live(&self) -> Live {
        self.live.clone()
    }

    fn uptime(&self) -> Duration {
        Duration::from_millis(12_340)
    }

    fn cpus(&self) -> u32 {
        2
    }
}

/// Runs a shell command: `mkdir PATH`, `rmdir PATH`, `rm PATH`, `ln PATH TARGET` or `echo PATH
/// TEXT`.
pub(crate) fn run_line(tree: &mut Tree, world: &dyn World, line: &str) -> Result<(), Errno> {
    let mut words = line.splitn(3, ' ');
    let (verb, path) = (words.next().unwrap(), words.next().unwrap());
    let text = words.next().unwrap_or_default().replace("\\n", "\n");
    let mut shell = Shell { tree, world };
    match verb {
        "mkdir" => shell.mkdir(path).map(|_| ()),
        "rmdir" => shell.rmdir(path),
        "rm" => shell.rm(path),
        "ln" => shell.link(path, &text),
        "echo" => shell.write(path, &format!("{text}\n")),
        // Write this without a newline, as programs do.
        "put" => shell.write(path, &text),
        _ => panic!("{verb}"),
    }
}

/// A tree and its world.
#[derive(Debug, Default)]
pub(crate) struct Fixture {
    pub(crate) tree: Tree,
    pub(crate) world: Fake,
}

/// The target in [`Fixture::served`].
pub(crate) const TPG: &str = "iscsi/iqn.2026-01.example:disk/tpgt_1";

impl Fixture {
    pub(crate) fn shell(&mut self) -> Shell<'_> {
        Shell {
            tree: &mut self.tree,
            world: &self.world,
        }
    }

    /// Runs shell commands, one per line.
    pub(crate) fn run(&mut self, script: &str) {
        for line in script.lines().map(str::trim).filter(|l| !l.is_empty()) {
            assert_eq!(self.try_line(line), Ok(()), "{line}");
        }
    }

    pub(crate) fn try_line(&mut self, line: &str) -> Result<(), Errno> {
        run_line(&mut self.tree, &self.world, line)
    }

    pub(crate) fn read(&mut self, path: &str) -> Result<String, Errno> {
        self.shell().read(path)
    }

    /// Creates a tree with a file that is exported as LUN 0 to a single initiator.
    pub(crate) fn served() -> Self {
        let mut fixture = Self::default();
        fixture.run(&served());
        fixture
    }
}

/// Returns the commands used by [`Fixture::served`].
pub(crate) fn served() -> String {
    format!(
        "mkdir core/fileio_0
             mkdir core/fileio_0/disk
             put core/fileio_0/disk/control fd_dev_name=/srv/disk,fd_dev_size=1048576
             echo core/fileio_0/disk/wwn/vpd_unit_serial 5a0e1b2c-0000-4000-8000-0123456789ab
             echo core/fileio_0/disk/enable 1
             mkdir iscsi
             mkdir iscsi/iqn.2026-01.example:disk
             mkdir {TPG}
             echo {TPG}/attrib/authentication 0
             mkdir {TPG}/np/127.0.0.1:3260
             mkdir {TPG}/lun/lun_0
             ln {TPG}/lun/lun_0/a /sys/kernel/config/target/core/fileio_0/disk
             mkdir {TPG}/acls/iqn.2026-01.example:client
             mkdir {TPG}/acls/iqn.2026-01.example:client/lun_0
             ln {TPG}/acls/iqn.2026-01.example:client/lun_0/b ../../../lun/lun_0
             echo {TPG}/enable 1"
    )
}
