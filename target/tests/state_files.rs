//! Tests a daemon with damaged state files.

use std::fs;

use riser_testkit::daemon::Daemon;

fn config(address: &str) -> String {
    format!(
        "backends:\n  a: {{ kind: ram, size: 1MiB }}\n\
         targets:\n  - name: demo\n    iqn: iqn.2026-01.com.example:demo\n    portals:\n      \
         - {{ protocol: iscsi, listen: \"{address}:3290\" }}\n    \
         luns: {{ 0: a }}\n    access: open\n"
    )
}

#[test]
fn damaged_history_and_ports_stop_no_disk() {
    let address = "127.81.5.1";
    let mut daemon = Daemon::start_logging("damaged", &config(address));
    let set = daemon.run_command(&["set", "/backends/a", "size=2MiB"]);
    assert!(set.status.success(), "{set:?}");
    for damage in [&[0xa5; 40][..], b""] {
        daemon.kill();
        for file in ["configurations.json", "ports.json"] {
            fs::write(daemon.dir.join("state").join(file), damage).unwrap();
        }
        fs::write(daemon.log(), "").unwrap();
        daemon.run(&["--restore"]);
        std::net::TcpStream::connect((address, 3290)).unwrap();
        let log = fs::read_to_string(daemon.log()).unwrap();
        let errors = |file: &str| {
            let errors = log.lines().filter(|line| line.contains("ERROR"));
            errors.filter(|line| line.contains(file)).count()
        };
        assert_eq!(
            [errors("configurations.json"), errors("ports.json")],
            [1; 2],
            "{log}"
        );
        // The history may not contain the last change, so the file is served.
        assert!(log.contains("so the configuration file is served"), "{log}");
        let targets = daemon.json("targets");
        assert_eq!(targets[0]["luns"]["0"]["size"], 1 << 20, "{targets}");
        // The next start uses valid files.
        daemon.kill();
        fs::write(daemon.log(), "").unwrap();
        daemon.run(&["--restore"]);
        let log = fs::read_to_string(daemon.log()).unwrap();
        assert!(!log.contains("ERROR"), "{log}");
    }
    // Without a valid generation, a new history is started.
    daemon.kill();
    for file in ["configurations.json", "configurations.json~"] {
        fs::write(daemon.dir.join("state").join(file), "{").unwrap();
    }
    daemon.run(&["--restore"]);
    let history = daemon.json("history");
    assert_eq!(history.as_array().unwrap().len(), 1, "{history}");
}
