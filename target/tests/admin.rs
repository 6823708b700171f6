//! Tests the daemon's admin socket, using the verbs of the program and plain HTTP.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use riser_test_peers::tcp::Client;
use riser_testkit::daemon::{Daemon, RISERD, run_command};
use riser_testkit::eventually;

/// Maximum delay before the next attempt for an unavailable part.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn daemon_reports_objects_and_reloads_file() {
    let daemon = Daemon::start("serves", "127.81.0.1");
    let status = daemon.json("status");
    assert_eq!(status["pid"], daemon.process.id());
    assert_eq!(status["workers"].as_array().unwrap().len(), 1);
    assert_eq!(daemon.json("sessions"), serde_json::json!([]));
    let targets = daemon.json("targets");
    assert_eq!(targets[0]["iqn"], "iqn.2026-01.com.example:demo");
    assert_eq!(targets[0]["portals"][1]["protocol"], "iscsi");
    assert_eq!(targets[0]["luns"]["0"]["size"], 1 << 20);
    assert!(targets[0]["luns"].get("1").is_none());

    daemon.configure("127.81.0.1", "{ 0: a, 1: b }");
    let reloaded = daemon.json("reload");
    assert_eq!(
        reloaded["changes"][0]["path"], "/targets/demo/luns/1",
        "{reloaded}"
    );
    assert_eq!(daemon.json("targets")[0]["luns"]["1"]["size"], 2 << 20);
    let file = daemon.dir.join("riserd.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("count: 1", "count: 2")).unwrap();
    let refused = daemon.run_command(&["reload"]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        said.contains("requires a restart; nothing was applied"),
        "{said}"
    );
    let text = String::from_utf8(daemon.run_command(&["targets"]).stdout).unwrap();
    assert!(text.contains("  srp 127.81.0.1:5555"), "{text}");
}

#[test]
fn unavailable_portal_is_served_later_if_allowed() {
    let daemon = Daemon::start("unavailable", "127.81.0.16");
    let portal = [
        "create",
        "/targets/demo/portals",
        "protocol=iscsi",
        "listen=192.0.2.10",
    ];
    let refused = daemon.run_command(&portal);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("nothing was applied"), "{said}");
    let allowed = daemon.run_command(&[&portal[..], &["--allow-unavailable"]].concat());
    assert!(allowed.status.success(), "{allowed:?}");
    let status = String::from_utf8(daemon.run_command(&["status"]).stdout).unwrap();
    assert!(status.contains("NOT SERVED"), "{status}");
    assert!(status.contains("192.0.2.10:3260"), "{status}");
    let history = daemon.json("history");
    assert_eq!(history[0]["how"], "create", "{history}");
    // Later changes must still be possible.
    assert!(
        daemon
            .run_command(&["set", "/limits", "max_sessions=9"])
            .status
            .success()
    );
    assert_eq!(daemon.json("history")[0]["how"], "set");
}

#[test]
fn unavailable_metrics_address_is_retried() {
    let daemon = Daemon::start("metrics-later", "127.81.0.17");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let listen = format!("listen={address}");
    let create = ["create", "/metrics", &listen];
    let refused = daemon.run_command(&create);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("nothing was applied"), "{said}");
    let allowed = daemon.run_command(&[&create[..], &["--allow-unavailable"]].concat());
    assert!(allowed.status.success(), "{allowed:?}");
    let problems = || daemon.json("status")["problems"].clone();
    assert_eq!(problems()[0]["kind"], "metrics", "{}", problems());
    // Other changes must still be possible.
    let set = daemon.run_command(&["set", "/limits", "max_sessions=9"]);
    assert!(set.status.success(), "{set:?}");
    drop(taken);
    eventually("metrics are served", PATIENCE, || {
        std::net::TcpStream::connect(&address).is_ok()
    });
    assert!(problems().is_null(), "{}", problems());
}

#[test]
fn rollback_serves_available_parts_if_allowed() {
    let daemon = Daemon::start("rollback-part", "127.81.0.18");
    let disk = daemon.dir.join("disk");
    let disk = format!("path={}", disk.display());
    let create = [
        "create",
        "/backends/c",
        "kind=file",
        &disk,
        "size=1MiB",
        "create=true",
    ];
    for change in [
        &create[..],
        &["create", "/targets/demo/luns/1", "backend=c"],
    ] {
        let changed = daemon.run_command(change);
        assert!(changed.status.success(), "{changed:?}");
    }
    let before = daemon.run_command(&["apply", daemon.dir.join("riserd.yaml").to_str().unwrap()]);
    assert!(before.status.success(), "{before:?}");
    std::fs::remove_file(daemon.dir.join("disk")).unwrap();
    let refused = daemon.run_command(&["rollback"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let allowed = daemon.run_command(&["rollback", "--allow-unavailable"]);
    assert!(allowed.status.success(), "{allowed:?}");
    assert_eq!(daemon.json("history")[0]["how"], "rollback 1");
    assert_eq!(daemon.json("status")["problems"][0]["name"], "c");
}

/// Otherwise a host could write data to the wrong disk.
#[test]
fn disks_in_use_do_not_exchange_numbers() {
    let daemon = Daemon::start("exchange", "127.81.0.19");
    daemon.configure("127.81.0.19", "{ 0: a, 1: b }");
    daemon.json("reload");
    let portal = "127.81.0.19:3290".parse().unwrap();
    let session = Client::login_at(portal, "iqn.2026-01.com.example:demo", 1, None).unwrap();
    daemon.configure("127.81.0.19", "{ 0: b, 1: a }");
    let refused = daemon.run_command(&["reload"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        said.contains("LUN 0 of target demo would become backend b"),
        "{said}"
    );
    let path = daemon.dir.join("riserd.yaml").display().to_string();
    let difference = String::from_utf8(daemon.run_command(&["diff", &path]).stdout).unwrap();
    assert!(
        difference.contains("would become backend b"),
        "{difference}"
    );
    assert_eq!(daemon.json("targets")[0]["luns"]["0"]["size"], 1 << 20);
    // This is allowed in two steps, or without initiators.
    let delete = daemon.run_command(&["delete", "/targets/demo/luns/0"]);
    assert!(delete.status.success(), "{delete:?}");
    drop(session);
    eventually("the session ends", PATIENCE, || {
        daemon.json("sessions") == serde_json::json!([])
    });
    let reloaded = daemon.run_command(&["reload"]);
    assert!(reloaded.status.success(), "{reloaded:?}");
    assert_eq!(daemon.json("targets")[0]["luns"]["0"]["size"], 2 << 20);
}

#[test]
fn empty_socket_variable_means_default() {
    let output = Command::new(&*RISERD)
        .arg("sessions")
        .env("RISERD_SOCKET", "")
        .env("RUNTIME_DIRECTORY", "/nonexistent")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("/nonexistent/admin.sock"), "{said}");
}

#[test]
fn log_filter_changes_without_restart() {
    let config = "targets: []\nlog: { filter: error, format: json, audit: off }\n";
    let daemon = Daemon::start_logging("filter", config);
    let set = |path: &str, value: &str| {
        let output = daemon.run_command(&["set", path, value]);
        assert!(output.status.success(), "{output:?}");
    };
    let changes = || {
        let log = std::fs::read_to_string(daemon.log()).unwrap();
        log.matches("\"changed\"").count()
    };
    set("/limits", "max_sessions=9");
    assert_eq!(changes(), 0);
    set("/log", "filter=warn,riser_target=info");
    set("/limits", "max_sessions=8");
    assert_eq!(changes(), 2, "the filter itself, and the limit");
    assert!(
        daemon
            .run_command(&["delete", "/log/filter"])
            .status
            .success()
    );
    set("/log", "filter=error");
    let before = changes();
    set("/limits", "max_sessions=7");
    assert_eq!(changes(), before);
    let refused = daemon.run_command(&["set", "/log", "format=text"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
}

#[test]
fn configuration_is_applied_saved_and_rolled_back() {
    let mut daemon = Daemon::start("apply", "127.81.0.6");
    let file = |daemon: &Daemon| daemon.dir.join("riserd.yaml").display().to_string();
    let path = file(&daemon);
    let same = daemon.run_command(&["diff", &path]);
    assert_eq!(same.status.code(), Some(0), "{same:?}");
    daemon.configure("127.81.0.6", "{ 0: a, 1: b }");
    let differs = daemon.run_command(&["diff", &path]);
    assert_eq!(differs.status.code(), Some(3), "{differs:?}");
    let said = String::from_utf8(differs.stdout).unwrap();
    assert_eq!(said, "+ /targets/demo/luns/1: \"b\"\n");
    assert!(
        daemon.json("targets")[0]["luns"].get("1").is_none(),
        "no effect"
    );
    let applied = daemon.run_command(&["apply", &path, "-o", "json"]);
    let applied: serde_json::Value = serde_json::from_slice(&applied.stdout).unwrap();
    let expected = serde_json::json!({
        "changes": [{ "path": "/targets/demo/luns/1", "old": null, "new": "b" }]
    });
    assert_eq!(applied, expected);
    assert_eq!(daemon.json("targets")[0]["luns"]["1"]["size"], 2 << 20);
    // The saved file must be identical.
    let saved = daemon.dir.join("saved.yaml").display().to_string();
    assert!(daemon.run_command(&["save", &saved]).status.success());
    assert_eq!(daemon.run_command(&["diff", &saved]).status.code(), Some(0));
    let mode = std::os::unix::fs::PermissionsExt::mode;
    let metadata = std::fs::metadata(&saved).unwrap();
    assert_eq!(mode(&metadata.permissions()) & 0o777, 0o600);
    assert_eq!(daemon.json("save")["targets"][0]["luns"]["1"], "b");
    let yaml = daemon.http("GET /v1/config");
    assert!(yaml.contains("application/yaml"), "{yaml}");
    assert!(
        yaml.ends_with(&std::fs::read_to_string(&saved).unwrap()),
        "{yaml}"
    );
    // A mistake is reported with its location, as an error of the caller.
    std::fs::write(&saved, "targets: [{}]").unwrap();
    assert_eq!(
        daemon.run_command(&["apply", &saved]).status.code(),
        Some(2)
    );
    // Roll back, and then undo the rollback.
    let back = daemon.run_command(&["rollback"]);
    let said = String::from_utf8(back.stdout).unwrap();
    let (change, note) = said.split_once('\n').unwrap();
    assert_eq!(change, "- /targets/demo/luns/1: \"b\"");
    // The file still has the change, which would be served after a restart.
    assert!(note.contains("riserd save FILE"), "{note}");
    assert_eq!(daemon.json("status")["unsaved"], true);
    let history = daemon.json("history");
    let how: Vec<_> = history
        .as_array()
        .unwrap()
        .iter()
        .map(|e| &e["how"])
        .collect();
    assert_eq!(how, ["rollback 1", "apply", "start"]);
    assert_eq!(history[1]["changes"][0]["path"], "/targets/demo/luns/1");
    assert_eq!(history[2]["changes"], serde_json::json!([]));
    assert!(history[1]["who"].as_str().unwrap().starts_with("uid "));
    assert!(daemon.run_command(&["rollback", "1"]).status.success());
    assert_eq!(
        daemon.run_command(&["rollback", "9"]).status.code(),
        Some(1)
    );
    assert_eq!(daemon.json("targets")[0]["luns"]["1"]["size"], 2 << 20);
    // With `--restore`, a restart serves the last configuration, unless the file was edited.
    for _ in 0..2 {
        daemon.restart(&["--restore"]);
        assert_eq!(daemon.json("targets")[0]["luns"]["1"]["size"], 2 << 20);
        assert_eq!(daemon.json("history").as_array().unwrap().len(), 4);
    }
    daemon.configure("127.81.0.6", "{ 3: a }");
    daemon.restart(&["--restore"]);
    assert_eq!(daemon.json("targets")[0]["luns"]["3"]["size"], 1 << 20);
    assert_eq!(daemon.json("history").as_array().unwrap().len(), 5);
    // If the running daemon has already read an edit, it's not treated as an edit at the next
    // start.
    daemon.configure("127.81.0.6", "{ 4: a }");
    assert!(daemon.run_command(&["reload"]).status.success());
    assert!(daemon.run_command(&["rollback", "2"]).status.success());
    daemon.restart(&["--restore"]);
    assert_eq!(daemon.json("targets")[0]["luns"]["1"]["size"], 2 << 20);
    // Without `--restore`, the file is served.
    daemon.restart(&[]);
    assert_eq!(daemon.json("targets")[0]["luns"]["4"]["size"], 1 << 20);
}

#[test]
fn secrets_are_read_from_sources() {
    let mut daemon = Daemon::start("secrets", "127.81.0.7");
    let file = daemon.dir.join("riserd.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    let with = |secret: &str| {
        let chap = format!("discovery_chap: {{ users: [{{ name: me, {secret} }}] }}\n");
        std::fs::write(&file, format!("{text}{chap}")).unwrap();
    };
    let path = file.display().to_string();
    for (secret, why) in [
        ("secret_env: RISERD_NO_SUCH", "$RISERD_NO_SUCH is not set"),
        ("secret_credential: mine", "No such file"),
    ] {
        with(secret);
        let refused = daemon.run_command(&["apply", &path]);
        assert_eq!(refused.status.code(), Some(1));
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(
            said.contains(why) && said.contains("nothing was applied"),
            "{said}"
        );
    }
    std::fs::write(daemon.dir.join("mine"), "a secret of ours\n").unwrap();
    assert!(daemon.run_command(&["apply", &path]).status.success());
    with("secret_env: PATH");
    daemon.restart(&[]);
    let saved = String::from_utf8(daemon.run_command(&["save"]).stdout).unwrap();
    assert!(saved.contains("secret_env: PATH"), "{saved}");
}

#[test]
fn session_lists_negotiated_parameters() {
    let daemon = Daemon::start("session", "127.81.0.2");
    // The first Login Request of a discovery session, up to operational negotiation.
    let keys = "InitiatorName=iqn.2026-01.com.example:me\0SessionType=Discovery\0\
                MaxRecvDataSegmentLength=16384\0";
    let mut pdu = vec![0u8; 48];
    pdu[0] = 0x43;
    pdu[1] = 0x87;
    pdu[7] = keys.len() as u8;
    pdu[8] = 0x80;
    pdu.extend(keys.as_bytes());
    pdu.resize(pdu.len().next_multiple_of(4), 0);
    let mut stream = std::net::TcpStream::connect("127.81.0.2:3290").unwrap();
    stream.write_all(&pdu).unwrap();
    let mut bhs = [0; 48];
    stream.read_exact(&mut bhs).unwrap();
    assert_eq!(
        (bhs[0], bhs[1] & 0x80, bhs[36]),
        (0x23, 0x80, 0),
        "the login succeeds"
    );

    let sessions = daemon.json("sessions");
    assert_eq!(sessions[0]["protocol"], "iscsi");
    assert_eq!(sessions[0]["state"], "live");
    let terms = &sessions[0]["negotiated"];
    assert_eq!(terms["SessionType"], "Discovery");
    assert_eq!(terms["MaxRecvDataSegmentLength (initiator)"], "16384");
    assert_eq!(terms["HeaderDigest"], "None");
}

#[test]
fn plain_http_gets_json_and_clear_errors() {
    let daemon = Daemon::start("http", "127.81.0.3");
    assert!(daemon.http("GET /v1/sessions").ends_with("\r\n\r\n[]"));
    let missing = daemon.http("GET /v2/sessions");
    assert!(missing.starts_with("HTTP/1.1 404 "), "{missing}");
    assert!(
        missing.ends_with(r#"{"error":"unknown path"}"#),
        "{missing}"
    );
    assert!(
        daemon
            .http("DELETE /v1/sessions")
            .starts_with("HTTP/1.1 405 ")
    );
    // A stalled client must not block other clients.
    let _stalled = UnixStream::connect(daemon.socket()).unwrap();
    assert!(daemon.http("GET /v1/status").starts_with("HTTP/1.1 200 "));
}

#[test]
fn configuration_is_replaced_if_revision_matches() {
    let daemon = Daemon::start("revision", "127.81.0.8");
    let read = || {
        let response = daemon.http("GET /v1/config");
        let (head, yaml) = response.split_once("\r\n\r\n").unwrap();
        let tag = head.lines().find_map(|line| line.strip_prefix("etag: "));
        (tag.unwrap().to_owned(), yaml.to_owned())
    };
    let put = |tag: &str, yaml: &str| {
        let length = yaml.len();
        let mut stream = UnixStream::connect(daemon.socket()).unwrap();
        let head =
            format!("Host: x\r\nConnection: close\r\nIf-Match: {tag}\r\nContent-Length: {length}");
        write!(stream, "PUT /v1/config HTTP/1.1\r\n{head}\r\n\r\n{yaml}").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    };
    let (first, yaml) = read();
    let grown = yaml.replace("0: a", "1: a");
    assert_ne!(grown, yaml);
    assert!(put(&first, &grown).starts_with("HTTP/1.1 200 "));
    let (second, now) = read();
    assert_eq!((second != first, now.as_str()), (true, grown.as_str()));
    let refused = put(&first, &yaml);
    assert!(refused.starts_with("HTTP/1.1 412 "), "{refused}");
    assert_eq!(read(), (second, grown.clone()));
    assert!(put("*", &yaml).starts_with("HTTP/1.1 200 "));
    // The same contents have the same revision.
    assert_eq!(read(), (first.clone(), yaml.clone()));
    // Errors of the operating system are reported.
    let taken = std::net::TcpListener::bind("127.81.0.8:3291").unwrap();
    let refused = put(&first, &yaml.replace(":3290", ":3291"));
    drop(taken);
    assert!(refused.starts_with("HTTP/1.1 409 "), "{refused}");
    assert!(refused.contains("\"errno\":98"), "{refused}");
    let other = yaml.replace("a:\n    kind: ram", "a:\n    thin: false\n    kind: ram");
    assert_ne!(other, yaml);
    let busy = put(&first, &other);
    assert!(busy.contains("\"errno\":16"), "{busy}");
}

#[test]
fn configuration_is_changed_by_patches() {
    let daemon = Daemon::start("patch", "127.81.0.10");
    let send = |request: &str, media_type: &str, body: &str| {
        let length = body.len();
        let mut stream = UnixStream::connect(daemon.socket()).unwrap();
        let head = format!(
            "Host: x\r\nConnection: close\r\nContent-Type: {media_type}\r\nContent-Length: {length}"
        );
        write!(stream, "{request} HTTP/1.1\r\n{head}\r\n\r\n{body}").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    };
    let merge = "application/merge-patch+json";
    let more = r#"{ "backends": { "c": { "kind": "ram", "size": "4MiB" } } }"#;
    let diff = send("POST /v1/diff", merge, more);
    assert!(diff.contains("\"path\":\"/backends/c\""), "{diff}");
    assert!(!daemon.http("GET /v1/config").contains("4MiB"));
    let done = send("PATCH /v1/config", merge, more);
    assert!(done.starts_with("HTTP/1.1 200 "), "{done}");
    let steps = r#"[{ "op": "add", "path": "/targets/0/luns/7", "value": "c" }]"#;
    let done = send("PATCH /v1/config", "application/json-patch+json", steps);
    assert!(done.starts_with("HTTP/1.1 200 "), "{done}");
    assert_eq!(daemon.json("targets")[0]["luns"]["7"]["size"], 4 << 20);
    // A mistake is reported with its location, and must not change anything.
    let wrong = r#"{ "limits": { "queue_depth": 0 } }"#;
    let refused = send("PATCH /v1/config", merge, wrong);
    assert!(refused.starts_with("HTTP/1.1 400 "), "{refused}");
    assert!(
        refused.contains("/limits/queue_depth: must be from"),
        "{refused}"
    );
    let refused = send("PATCH /v1/config", merge, "[");
    assert!(refused.starts_with("HTTP/1.1 400 "), "{refused}");
    let refused = send("PATCH /v1/config", "application/yaml", "limits: {}");
    assert!(refused.starts_with("HTTP/1.1 415 "), "{refused}");
    assert!(
        refused.contains("accept-patch: application/merge-patch+json"),
        "{refused}"
    );
}

#[test]
fn missing_daemon_error_names_socket() {
    let output = run_command(Path::new("/nonexistent/admin.sock"), &["sessions"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("cannot connect to riserd at /nonexistent/admin.sock"),
        "{said}"
    );
}

#[test]
fn second_daemon_keeps_existing_socket() {
    let daemon = Daemon::start("second", "127.81.0.4");
    let text = std::fs::read_to_string(daemon.dir.join("riserd.yaml")).unwrap();
    let other = daemon.dir.join("other.yaml");
    let text = text.replace("127.81.0.4", "127.81.0.5");
    std::fs::write(&other, text.replace("/state }", "/other }")).unwrap();
    let output = Command::new(&*RISERD)
        .args(["run", "--config"])
        .arg(&other)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("in use by another daemon"), "{said}");
    assert_eq!(daemon.json("status")["pid"], daemon.process.id());
}

#[test]
fn unavailable_admin_socket_is_retried() {
    let mut daemon = Daemon::start("later", "127.81.0.10");
    daemon.kill();
    let file = daemon.dir.join("riserd.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    let metrics = "metrics: { listen: 127.81.0.10:9909 }\n";
    // There is a file in place of the directory.
    let blocked = daemon.dir.join("run");
    let socket = blocked.join("admin.sock");
    let named = |path: &Path| path.display().to_string();
    let text = text.replace(&named(&daemon.socket()), &named(&socket)) + metrics;
    std::fs::write(&file, format!("{text}strict: true\n")).unwrap();
    std::fs::write(&blocked, "").unwrap();
    let run = || {
        let mut command = Command::new(&*RISERD);
        command.args(["run", "--config"]).arg(&file);
        command
    };
    let refused = run().output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains(&named(&socket)), "{said}");

    std::fs::write(&file, &text).unwrap();
    daemon.process = run().stderr(std::process::Stdio::null()).spawn().unwrap();
    let wait = std::time::Duration::from_secs(30);
    let ready = || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect("127.81.0.10:9909")?;
        stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    };
    let problem = format!("admin {}: cannot listen", named(&socket));
    eventually("it is named", wait, || {
        ready().is_ok_and(|response| response.contains(&problem))
    });
    assert!(std::net::TcpStream::connect("127.81.0.10:3290").is_ok());
    std::fs::remove_file(&blocked).unwrap();
    eventually("it is there", wait, || socket.exists());
    let output = run_command(&socket, &["status", "-o", "json"]);
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status["pid"], daemon.process.id());
    assert!(status.get("problems").is_none(), "{status}");
}

#[test]
fn saved_names_survive_host_rename() {
    let mut daemon = Daemon::start("kept-names", "127.81.0.9");
    daemon.kill();
    // Simulates a different host at the first start.
    let path = daemon.dir.join("state/identities.json");
    let kept = std::fs::read_to_string(&path).unwrap();
    let mut kept: serde_json::Value = serde_json::from_str(&kept).unwrap();
    kept["host"] = "before".into();
    kept["backends"]["a"]["serial"] = "KEPT-1".into();
    std::fs::write(&path, kept.to_string()).unwrap();
    daemon.run(&[]);
    let text = std::fs::read_to_string(daemon.dir.join("riserd.yaml")).unwrap();
    let config = riser_target::config::Config::parse(&text, "riserd.yaml").unwrap();
    let host = riser_target::config::HostId::new("before");
    let portal = &config.targets[0].portals[0];
    let guid = serde_json::json!(portal.ioc_guid(&host, "demo").to_string());
    let run_json = |args: &[&str]| -> serde_json::Value {
        let output = daemon.run_command(args);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    };
    let info = run_json(&["info", "/targets/demo/portals/srp:127.81.0.9", "-o", "json"]);
    assert_eq!(info["live"]["ioc_guid"], guid);
    assert_eq!(info["live"]["id_ext"], guid);
    let served = &run_json(&["targets", "-o", "json"])[0];
    assert_eq!(served["portals"][0]["names"]["service_guid"], guid);
    assert_eq!(served["luns"]["0"]["serial"], "KEPT-1");
    // The same without the daemon.
    let checked = std::process::Command::new(&*RISERD)
        .args(["check", "-o", "json"])
        .arg(daemon.dir.join("riserd.yaml"))
        .output()
        .unwrap();
    let checked: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
    let target = &checked["targets"][0];
    assert_eq!(target["portals"][0]["ioc_guid"], guid);
    assert_eq!(target["luns"][0]["serial"], "KEPT-1");
}

#[test]
fn reload_reports_reverted_changes() {
    let text = "limits: { max_sessions: 7 }\ntargets: []\n";
    let daemon = Daemon::start_logging("unsaved", text);
    let changed = daemon.run_command(&["set", "/limits", "max_sessions=9"]);
    let said = String::from_utf8(changed.stdout).unwrap();
    assert!(said.contains("`riserd reload`"), "{said}");
    let reloaded = daemon.run_command(&["reload"]);
    let said = String::from_utf8(reloaded.stdout).unwrap();
    assert_eq!(said, "~ /limits/max_sessions: 9 -> 7\n");
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    let warnings = |log: &str| {
        let lines = log
            .lines()
            .filter(|line| line.contains("reverted a change"));
        lines.map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let found = warnings(&log);
    assert_eq!(found.len(), 1, "{log}");
    assert!(
        found[0].contains("WARN") && found[0].contains("/limits/max_sessions"),
        "{found:?}"
    );
    // A change to the file itself is not reported.
    daemon.write(&text.replace('7', "8"));
    assert!(daemon.run_command(&["reload"]).status.success());
    let log = std::fs::read_to_string(daemon.log()).unwrap();
    assert_eq!(warnings(&log).len(), 1, "{log}");
}

/// With `--restore`, which is set in the package, changes are kept after a restart, unless the file
/// was edited.
#[test]
fn unsaved_changes_are_reported_once_and_kept() {
    let mut daemon = Daemon::start("lacks", "127.81.0.16");
    daemon.restart(&["--restore"]);
    let said = |daemon: &Daemon, number: u32| {
        let change = format!("max_sessions={number}");
        let output = daemon.run_command(&["set", "/limits", &change]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let standing = |daemon: &Daemon| {
        let status = daemon.json("status");
        let is = |name: &str| status[name] == true;
        (is("unsaved"), is("restored"))
    };
    assert_eq!(standing(&daemon), (false, false));
    let first = said(&daemon, 9);
    assert!(first.contains("a restart keeps them"), "{first}");
    assert!(first.contains("`riserd save FILE`"), "{first}");
    let second = said(&daemon, 10);
    assert!(!second.contains("restart"), "{second}");
    let status = String::from_utf8(daemon.run_command(&["status"]).stdout).unwrap();
    assert!(status.contains("a restart keeps them"), "{status}");
    daemon.restart(&["--restore"]);
    assert_eq!(standing(&daemon), (false, true));
    // The file was edited, but not read by the daemon: it's served after a restart.
    daemon.configure("127.81.0.16", "{ 0: a, 1: b }");
    assert_eq!(standing(&daemon), (true, false));
    daemon.restart(&["--restore"]);
    assert_eq!(standing(&daemon), (false, false));
    // If the changes were written to the file by `save`, this is not treated as an edit, and later
    // changes are kept.
    said(&daemon, 9);
    let file = daemon.dir.join("riserd.yaml").display().to_string();
    assert!(daemon.run_command(&["save", &file]).status.success());
    assert_eq!(standing(&daemon), (false, false));
    let third = said(&daemon, 10);
    assert!(third.contains("a restart keeps them"), "{third}");
    daemon.restart(&["--restore"]);
    assert_eq!(standing(&daemon), (false, true));
    let served = daemon.run_command(&["get", "/limits/max_sessions"]).stdout;
    assert_eq!(String::from_utf8(served).unwrap().trim(), "10");
}
