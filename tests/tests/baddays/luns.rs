//! Several hosts that should each see their own disk as LUN 0.

use crate::eventually;
use crate::target::Daemon;

fn config(second: &str) -> String {
    format!(
        "
backends:
  a: {{ kind: ram, size: 16MiB }}
  b: {{ kind: ram, size: 16MiB }}
targets:
  - name: t
    iqn: iqn.2026-01.com.example:t
    portals:
      - {{ protocol: srp, listen: 127.0.200.1 }}
      - {{ protocol: iscsi, listen: 127.0.200.1 }}
      - {{ protocol: iser, listen: 127.0.200.1:3261 }}
    luns: {{ 0: a, 1: b }}
    access:
      - {{ address: 127.0.200.2, luns: {{ 0: a, 5: b }} }}
      - {{ address: 127.0.200.3, luns: {second} }}"
    )
}

/// Returns the addresses of a LUN for each protocol.
fn urls(number: u8) -> [String; 3] {
    let iqn = "iqn.2026-01.com.example:t";
    [
        format!("srp://127.0.200.1/{number}"),
        format!("iscsi://127.0.200.1/{iqn}/{number}"),
        format!("iser://127.0.200.1:3261/{iqn}/{number}"),
    ]
}

/// Reads the first block of a unit from a host. Returns `None` if this unit is not visible to the
/// host.
fn first_byte(daemon: &Daemon, host: u8, url: &str) -> Option<u8> {
    let from = format!("--addr=127.0.200.{host}");
    let data = daemon.path("data");
    let to = data.to_str().unwrap();
    let mut read = daemon.riser(&["read", url, to, "--length=4096", "-q", &from]);
    let is_done = read.output().unwrap().status.success();
    is_done.then(|| std::fs::read(&data).unwrap()[0])
}

fn fill(daemon: &Daemon, host: u8, url: &str, byte: u8) -> bool {
    let data = daemon.path("data");
    std::fs::write(&data, [byte; 4096]).unwrap();
    let from = format!("--addr=127.0.200.{host}");
    let file = data.to_str().unwrap();
    let mut write = daemon.riser(&["write", url, file, "-q", "--overwrite", &from]);
    write.output().unwrap().status.success()
}

#[test]
fn hosts_have_separate_luns() {
    let mut daemon = Daemon::new(&config("{ 0: b }"));
    daemon.serve();
    for (n, (zero, five)) in urls(0).iter().zip(&urls(5)).enumerate() {
        let n = n as u8;
        assert!(fill(&daemon, 2, zero, 0xa0 + n), "{zero}");
        assert!(fill(&daemon, 2, five, 0xb0 + n), "{five}");
        assert_eq!(first_byte(&daemon, 3, zero), Some(0xb0 + n), "{zero}");
        assert_eq!(first_byte(&daemon, 2, zero), Some(0xa0 + n), "{zero}");
        assert_eq!(first_byte(&daemon, 3, five), None, "{five}");
    }
    // Numbers are changed at run time, using both a command and the file.
    let path = "/targets/t/access/1/luns/9";
    let (code, _, errors) = daemon.run_command(&["create", path, "backend=a", "read_only=true"]);
    assert_eq!(code, 0, "{errors}");
    let [url, ..] = urls(9);
    assert_eq!(first_byte(&daemon, 3, &url), Some(0xa2));
    assert!(!fill(&daemon, 3, &url, 1), "it is read-only");
    assert_eq!(first_byte(&daemon, 3, &url), Some(0xa2));
    let config = daemon.json(&["get", "/targets/t/access"]);
    assert_eq!(
        config[1]["luns"],
        serde_json::json!({ "0": { "backend": "b" }, "9": { "backend": "a", "read_only": true } })
    );
    daemon.write(&config_of_file());
    let (code, _, errors) = daemon.run_command(&["reload"]);
    assert_eq!(code, 0, "{errors}");
    for url in urls(0) {
        eventually("the number leads to the other disk", || {
            first_byte(&daemon, 3, &url) == Some(0xa2)
        });
    }
}

fn config_of_file() -> String {
    config("{ 0: a }")
}
