//! Uses Debian's `targetcli` and `targetctl` to configure a running `riserd` via the tree provided
//! by `riserd-configfs`, and then uses this configuration with `riser` over iSCSI, iSER and SRP.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use riser_testkit::eventually;
use riser_testkit::programs::{directory, missing, skip, succeeded};
use riser_transport::nic::device_guid;

const TARGET: &str = "iqn.2026-01.com.example:t";
const ALICE: &str = "iqn.2026-01.com.example:alice";
const BOB: &str = "iqn.2026-01.com.example:bob";
/// SRP port, which is the address 10.91.0.1.
const PORT: &str = "00000000000000000000ffff0a5b0001";

/// A `riserd` in a separate network namespace, its mounted tree and a directory.
struct Rig {
    dir: PathBuf,
    programs: PathBuf,
    /// Process that keeps the namespace alive.
    keeper: Child,
    daemon: Option<Child>,
    tree: Option<Child>,
}

/// Waits until a condition is true.
#[track_caller]
fn until(what: &str, holds: impl Fn() -> bool) {
    eventually(what, Duration::from_secs(60), holds);
}

impl Rig {
    /// Prints a message and returns `None` if this is not supported here.
    fn new(test: &str) -> Option<Self> {
        let tools = [
            "unshare",
            "nsenter",
            "ip",
            "fusermount3",
            "dbus-run-session",
            "targetcli",
            "targetctl",
        ];
        let why = match missing(&tools) {
            Some(tool) => Some(format!("{tool} is not installed")),
            None if File::open("/dev/fuse").is_err() => Some("FUSE is missing".to_owned()),
            None => {
                let tried = Command::new("unshare").args(["-n", "-m", "true"]).status();
                let works = tried.is_ok_and(|status| status.success());
                (!works).then(|| "it takes root".to_owned())
            }
        };
        if let Some(why) = why {
            skip(test, &why);
            return None;
        }
        let dir = std::env::temp_dir().join(format!("riser-{test}-{}", std::process::id()));
        fs::create_dir_all(dir.join("config")).unwrap();
        fs::create_dir_all(dir.join("etc/backup")).unwrap();
        let text = format!(
            "targets: []\nadmin: {{ socket: {0}/admin.sock }}\nstate: {{ directory: {0}/state }}\n\
             workers: {{ count: 1 }}\nlimits: {{ buffer_pool_mib: 16 }}\n",
            dir.display()
        );
        fs::write(dir.join("riserd.yaml"), text).unwrap();
        let network = "ip link set lo up && ip address add 10.91.0.1/24 dev lo && \
                       ip address add 10.91.0.2/24 dev lo && touch ready && exec sleep infinity";
        let keeper = Command::new("unshare")
            .args(["-n", "sh", "-c", network])
            .current_dir(&dir)
            .spawn()
            .unwrap();
        let mut rig = Self {
            programs: directory(),
            keeper,
            daemon: None,
            tree: None,
            dir,
        };
        until("a network", || rig.dir.join("ready").exists());
        rig.serve();
        let mut tree = rig.inside(&rig.programs.join("riserd-configfs"));
        tree.arg(rig.dir.join("config"))
            .env("RISERD_SOCKET", rig.dir.join("admin.sock"))
            .stderr(rig.log("configfs.log"));
        rig.tree = Some(tree.spawn().unwrap());
        until("the tree", || rig.dir.join("config/target").exists());
        Some(rig)
    }

    fn log(&self, name: &str) -> File {
        let path = self.dir.join(name);
        File::options()
            .create(true)
            .append(true)
            .open(path)
            .unwrap()
    }

    /// Returns a command that runs in the network namespace.
    fn inside(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg("-n")
            .args(["-t", &self.keeper.id().to_string(), "--"])
            .arg(program)
            .stdin(Stdio::null());
        command
    }

    /// Starts riserd with its last configuration.
    fn serve(&mut self) {
        let mut daemon = self.inside(&self.programs.join("riserd"));
        daemon
            .args(["run", "--restore", "--config"])
            .arg(self.dir.join("riserd.yaml"))
            .stderr(self.log("riserd.log"));
        self.daemon = Some(daemon.spawn().unwrap());
        until("riserd", || self.dir.join("admin.sock").exists());
    }

    /// Restarts riserd in the same way as a service manager.
    fn restart(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        let pid = daemon.id().to_string();
        succeeded(Command::new("kill").args(["-TERM", &pid]));
        assert!(daemon.wait().unwrap().success());
        self.serve();
    }

    /// Runs a shell command with the tree mounted instead of the kernel's.
    fn run(&self, command: &str) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR"));
        let script = script.join("../configfs-emu/tests/rig/namespace.sh");
        let mut unshare = self.inside(Path::new("unshare"));
        unshare
            .args(["-m", "--propagation", "private", "dbus-run-session", "--"])
            .arg("sh")
            .arg(script)
            .arg(&self.dir)
            .arg(command)
            .env("RISERD_SOCKET", self.dir.join("admin.sock"));
        unshare.output().unwrap()
    }

    /// Same as [`Rig::run`], but the command must be successful. Returns its output.
    fn must(&self, command: &str) -> String {
        let Output {
            status,
            stdout,
            stderr,
        } = self.run(command);
        let said = String::from_utf8_lossy(&stdout).into_owned();
        let errors = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "{command}\n{said}\n{errors}");
        said
    }

    /// Returns the configuration from the daemon.
    fn config(&self) -> serde_json::Value {
        let mut save = Command::new(self.programs.join("riserd"));
        save.args(["save", "-o", "json", "--socket"])
            .arg(self.dir.join("admin.sock"));
        serde_json::from_str(&succeeded(&mut save)).unwrap()
    }

    fn riser(&self, args: &[&str], secret: &str) -> Command {
        let mut riser = self.inside(&self.programs.join("riser"));
        riser
            .args(args)
            .env("RISER_STATE_DIR", self.dir.join("riser"))
            .env("RISER_CHAP_PASSWORD", secret)
            .env("RISER_CHAP_TARGET_PASSWORD", "the-targets-own")
            .env_remove("RISER_PROVIDER");
        riser
    }

    /// Writes to a logical unit, then reads and verifies the data in a new session.
    fn used(&self, url: &str, secret: &str, seed: u8) {
        let data: Vec<u8> = (0..300_000u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed)
            .collect();
        let file = self.dir.join("data");
        fs::write(&file, &data).unwrap();
        let path = file.to_str().unwrap();
        succeeded(&mut self.riser(&["write", url, path, "--offset", "5000"], secret));
        self.holds(url, secret, &data);
    }

    fn holds(&self, url: &str, secret: &str, data: &[u8]) {
        let length = data.len().to_string();
        let args = ["read", url, "--offset", "5000", "--length", &length];
        let read = self.riser(&args, secret).output().unwrap();
        assert!(read.status.success(), "{read:?}");
        assert!(read.stdout == data, "{url} holds other data");
    }

    /// Returns true if an initiator can log in.
    fn lets_in(&self, url: &str, secret: &str) -> bool {
        let args = ["inquiry", url, "--timeout", "5s"];
        let tried = self.riser(&args, secret).output().unwrap();
        tried.status.success()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["riserd.log", "configfs.log"] {
                let log = fs::read_to_string(self.dir.join(name)).unwrap_or_default();
                let _ = writeln!(std::io::stderr(), "{name}: {log}");
            }
        }
        let mount = self.dir.join("config");
        let _ = Command::new("fusermount3").arg("-uz").arg(mount).status();
        let children = [self.tree.take(), self.daemon.take()];
        for mut child in children.into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Returns the addresses that are configured below, and the secret for each.
fn addresses() -> [(String, &'static str); 4] {
    let iscsi = |scheme: &str, user: &str, lun: u8, who: &str, more: &str| {
        format!("{scheme}://{user}@10.91.0.1/{TARGET}/{lun}?initiator={who}&src=10.91.0.2{more}")
    };
    let srp = "srp://10.91.0.1/0?src=10.91.0.2&initiator_ext=0000000000000001&channels=1";
    [
        (iscsi("iscsi", "al", 0, ALICE, ""), "a-secret-of-alice"),
        (iscsi("iser", "al", 1, ALICE, ""), "a-secret-of-alice"),
        (
            iscsi("iscsi", "bob", 1, BOB, "&target_user=us"),
            "another-one-of-bob",
        ),
        (srp.to_owned(), ""),
    ]
}

/// Configures SRP using rtslib, because `targetcli` only shows SRP targets if there is an RDMA
/// adapter.
fn srp() -> String {
    let guid = device_guid("10.91.0.2".parse().unwrap());
    format!(
        "from rtslib_fb import FabricModule, LUN, MappedLUN, NodeACL, RTSRoot, Target, TPG\n\
         ram = [so for so in RTSRoot().storage_objects if so.name == 'ram'][0]\n\
         tpg = TPG(Target(FabricModule('srpt'), 'ib.{PORT}'), 1)\n\
         acl = NodeACL(tpg, 'ib.0000000000000001{guid:016x}')\n\
         MappedLUN(acl, 0, LUN(tpg, 0, ram))\n\
         tpg.enable = True\n"
    )
}

/// Returns the commands typed by a user.
fn session() -> String {
    let tpg = format!("/iscsi/{TARGET}/tpg1");
    format!(
        "targetcli /backstores/fileio create name=img file_or_dev=$FOLDER/img size=32M
         targetcli /backstores/ramdisk create name=ram size=16M
         targetcli /iscsi create {TARGET}
         targetcli {tpg}/luns create /backstores/fileio/img
         targetcli {tpg}/luns create /backstores/ramdisk/ram
         targetcli {tpg} set attribute authentication=1
         targetcli {tpg}/acls create {ALICE}
         targetcli {tpg}/acls/{ALICE} set auth userid=al password=a-secret-of-alice
         targetcli {tpg}/acls create {BOB}
         targetcli {tpg}/acls/{BOB} set auth userid=bob password=another-one-of-bob \
             mutual_userid=us mutual_password=the-targets-own
         targetcli {tpg}/portals delete 0.0.0.0 3260
         targetcli {tpg}/portals create 10.91.0.1 3260
         targetcli {tpg}/portals/10.91.0.1:3260 enable_iser boolean=true
         /usr/bin/python3 $FOLDER/srp.py
         targetcli saveconfig"
    )
}

#[test]
fn targetcli_configures_running_daemon() {
    let Some(mut rig) = Rig::new("targetcli") else {
        return;
    };
    fs::write(rig.dir.join("srp.py"), srp()).unwrap();
    rig.must(&session());
    let all_are_used = |rig: &Rig, seed| {
        for (url, secret) in addresses() {
            rig.used(&url, secret, seed);
        }
    };
    all_are_used(&rig, 1);
    commands_are_counted(&rig);
    secrets_are_each_ones_own(&rig);
    sessions_are_shown(&rig);
    what_is_refused_changes_nothing(&rig);
    what_others_change_is_shown(&rig);

    // The daemon keeps its configuration, and it must be shown when the tree is mounted again.
    let before = rig.config();
    rig.restart();
    assert_eq!(rig.config(), before);
    let said = rig.must("targetcli ls");
    assert!(said.contains("[1-way auth, Mapped LUNs: 2]"), "{said}");
    assert!(said.contains("[mutual auth, Mapped LUNs: 2]"), "{said}");
    all_are_used(&rig, 2);

    files_are_converted(&rig);

    rig.must("targetcli clearconfig confirm=True");
    assert_eq!(rig.config()["targets"], serde_json::json!([]));
    assert!(rig.config().get("backends").is_none());
    for (url, secret) in addresses() {
        assert!(!rig.lets_in(&url, secret), "{url}");
    }
    rig.must("targetcli restoreconfig");
    assert_eq!(rig.config(), before);
    all_are_used(&rig, 3);

    rig.must("targetctl clear && targetctl restore && targetcli ls");
    assert_eq!(rig.config(), before);
    all_are_used(&rig, 4);
    rig.must("targetctl clear");
    assert_eq!(rig.config()["targets"], serde_json::json!([]));
}

/// Must be called after all initiators have logged in twice.
fn commands_are_counted(rig: &Rig) {
    let said = rig.must(&format!(
        "cd /sys/kernel/config/target
         cat core/fileio_0/img/statistics/scsi_lu/num_cmds core/rd_mcp_1/ram/statistics/scsi_lu/num_cmds
         cd iscsi/{TARGET}
         cat tpgt_1/lun/lun_1/statistics/scsi_tgt_port/in_cmds
         cat tpgt_1/acls/{ALICE}/lun_0/statistics/scsi_auth_intr/num_cmds
         cat fabric_statistics/iscsi_login_stats/accepts
         cat fabric_statistics/iscsi_logout_stats/normal_logouts"
    ));
    let counts: Vec<u64> = said.lines().map(|line| line.parse().unwrap()).collect();
    let [file, memory, port, alice, logins, logouts] = counts[..] else {
        panic!("{said}");
    };
    // SRP uses the RAM disk as well.
    assert!(file > 0 && port > 0 && memory > port, "{said}");
    // No other client uses the file.
    assert_eq!(alice, file, "{said}");
    assert_eq!((logins, logouts), (6, 6), "{said}");
}

/// A configuration saved by rtslib must be the same as served by the daemon, and the daemon's
/// configuration must be restored by rtslib.
fn files_are_converted(rig: &Rig) {
    let convert = |args: &[&str]| {
        let mut convert = rig.inside(&rig.programs.join("riserd-configfs"));
        convert
            .args(args)
            .env("RISERD_SOCKET", rig.dir.join("admin.sock"));
        succeeded(&mut convert)
    };
    let saved = rig.dir.join("etc/saveconfig.json");
    let yaml = convert(&["import", saved.to_str().unwrap()]);
    let file = rig.dir.join("imported.yaml");
    fs::write(&file, yaml).unwrap();
    let mut diff = Command::new(rig.programs.join("riserd"));
    diff.args(["diff", "-o", "json"]).arg(&file);
    diff.arg("--socket").arg(rig.dir.join("admin.sock"));
    let diff = diff.output().unwrap();
    let diff: serde_json::Value = serde_json::from_slice(&diff.stdout).unwrap();
    let paths: Vec<&str> = diff["changes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| change["path"].as_str().unwrap())
        .collect();
    // These settings are not supported in the file.
    assert_eq!(paths, ["/workers", "/limits", "/admin", "/state"]);

    let exported = rig.dir.join("exported.json");
    fs::write(&exported, convert(&["export"])).unwrap();
    let before = rig.config();
    rig.must("targetctl clear && targetctl restore $FOLDER/exported.json");
    assert_eq!(rig.config(), before);
}

fn secrets_are_each_ones_own(rig: &Rig) {
    let [(alice, of_alice), _, (bob, of_bob), _] = addresses();
    assert!(rig.lets_in(&alice, of_alice) && rig.lets_in(&bob, of_bob));
    assert!(!rig.lets_in(&alice, of_bob) && !rig.lets_in(&bob, of_alice));
    assert!(!rig.lets_in(&alice.replace("al@", ""), of_alice));
    let stranger = alice.replace(ALICE, "iqn.2026-01.com.example:mallory");
    assert!(!rig.lets_in(&stranger, of_alice));
}

fn sessions_are_shown(rig: &Rig) {
    let [(alice, secret), ..] = addresses();
    let tpg = format!("/sys/kernel/config/target/iscsi/{TARGET}/tpgt_1");
    let info = || {
        rig.must(&format!(
            "cat {tpg}/acls/{ALICE}/info {tpg}/dynamic_sessions"
        ))
    };
    let none = format!("No active iSCSI Session for Initiator Endpoint: {ALICE}\n");
    assert_eq!(info(), none);
    let socket = rig.dir.join("nbd.sock").display().to_string();
    succeeded(&mut rig.riser(&["attach", &alice, "--nbd", &socket], secret));
    let said = info();
    assert!(
        said.contains(&format!("InitiatorName: {ALICE}\n")),
        "{said}"
    );
    assert!(said.contains("TARG_SESS_STATE_LOGGED_IN"), "{said}");
    assert!(said.contains("Address 10.91.0.2"), "{said}");
    let terms = rig.must(&format!("cat {tpg}/acls/{ALICE}/param/ErrorRecoveryLevel"));
    assert_eq!(terms, "0\n");
    succeeded(&mut rig.riser(&["detach", &socket], secret));
    until("the session's end", || info() == none);
}

fn what_is_refused_changes_nothing(rig: &Rig) {
    let before = rig.config();
    let np = format!("/sys/kernel/config/target/iscsi/{TARGET}/tpgt_1/np");
    let refused = rig.run(&format!("mkdir {np}/192.0.2.77:3260"));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("Cannot assign requested address"), "{said}");
    let acl = format!("/sys/kernel/config/target/iscsi/{TARGET}/tpgt_1/acls/{ALICE}");
    let refused = rig.run(&format!(
        "/usr/bin/python3 -c \"open('{acl}/auth/password', 'wb', 0).write(b'short')\""
    ));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("Invalid argument"), "{said}");
    rig.must(&format!(
        "test ! -e {np}/192.0.2.77:3260; test \"$(cat {acl}/auth/password)\" = a-secret-of-alice"
    ));
    assert_eq!(rig.config(), before);
}

/// Applies a configuration to the daemon, like another administrator.
fn what_others_change_is_shown(rig: &Rig) {
    let before = rig.config();
    let mut other = before.clone();
    other["backends"]["more"] = serde_json::json!({ "kind": "ram", "size": "1MiB" });
    let iscsi = other["targets"].as_array_mut().unwrap();
    let iscsi = iscsi.iter_mut().find(|t| t["name"] == TARGET).unwrap();
    iscsi["luns"]["5"] = serde_json::json!("more");
    let apply = |document: &serde_json::Value| {
        let file = rig.dir.join("other.yaml");
        fs::write(&file, document.to_string()).unwrap();
        let mut apply = Command::new(rig.programs.join("riserd"));
        apply
            .arg("apply")
            .arg(file)
            .arg("--socket")
            .arg(rig.dir.join("admin.sock"));
        succeeded(&mut apply);
    };
    apply(&other);
    let lun = format!("/iscsi/{TARGET}/tpg1/luns/lun5");
    let said = rig.must(&format!("targetcli ls {lun}"));
    assert!(said.contains("[ramdisk/more"), "{said}");
    // The changes made by both must be kept.
    rig.must(&format!("targetcli /iscsi/{TARGET}/tpg1/luns delete lun5"));
    assert!(rig.config()["backends"].get("more").is_some());
    apply(&before);
}
