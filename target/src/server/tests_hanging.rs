//! Tests for controlling a server with a hanging file system.

use std::sync::Arc;
use std::time::Duration;

use riser_testkit::eventually_ok;

use super::Server;
use crate::backend::query;
use crate::config::Config;

fn config(dir: &std::path::Path, size: &str) -> Config {
    let dir = dir.display();
    let text = format!(
        "backends:\n\
         \x20 a: {{ kind: file, path: {dir}/a, size: {size}, create: true }}\n\
         \x20 b: {{ kind: file, path: {dir}/b, create: true, size: 1MiB }}\n\
         targets:\n\
         - name: iqn.2026-01.com.example:t\n\
         \x20 portals: [{{ protocol: iscsi, listen: \"127.97.8.5:3290\" }}]\n\
         \x20 luns: {{ 0: a, 1: b }}\n\
         \x20 access: open\n\
         workers: {{ count: 2 }}\n"
    );
    Config::parse(&text, "test.yaml").unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn hung_file_system_delays_no_other_disk() {
    let dir = std::env::temp_dir().join(format!("riserd-hanging-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir(&dir).unwrap();
    let present = config(&dir, "1MiB");
    let mut server = Server::start(&present).unwrap();
    let store = |name: &str| {
        let mut all = server.backends();
        Arc::clone(all.find(|(other, _)| *other == name).unwrap().1)
    };
    let (a, b) = (store("a"), store("b"));
    assert!(server.measurer()());
    assert!(a.space().is_some() && b.space().is_some());
    server.builder.check_successor(&present).unwrap();

    let release = query::hang(&a);
    std::fs::File::options()
        .write(true)
        .open(dir.join("b"))
        .unwrap()
        .set_len(2 << 20)
        .unwrap();
    let error = server.rescan().unwrap_err().to_string();
    assert!(
        error.contains("/a: the file system does not respond"),
        "{error}"
    );
    assert_eq!(server.capacity_of("b"), Some(2 << 20));
    let error = server.builder.check_successor(&present).unwrap_err();
    assert!(error.to_string().contains("does not respond"), "{error}");
    let error = server.change(config(&dir, "2MiB")).unwrap_err();
    assert!(error.to_string().contains("does not respond"), "{error}");
    assert!(server.measurer()());
    assert!(a.space().is_none() && b.space().is_some());

    drop(release);
    eventually_ok("the file system responds", Duration::from_secs(60), || {
        server.rescan()
    });
    server.change(config(&dir, "2MiB")).unwrap();
    assert_eq!(server.capacity_of("a"), Some(2 << 20));
    drop((a, b));
    server.shutdown().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
}
