//! Tests information reported by the daemon: metrics, health, the status page, and `riserd top`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use riser_testkit::daemon::{Daemon, RISERD};
use riser_testkit::eventually;

const LISTEN: &str = "127.81.1.1:9909";

/// Returns the response of a TCP address, or `None` if no process is listening.
fn get(address: &str, path: &str) -> Option<String> {
    get_of(address, address, path)
}

/// Sends a request like a browser that was directed here by a DNS name.
fn get_of(host: &str, address: &str, path: &str) -> Option<String> {
    request("GET", host, address, path)
}

fn request(method: &str, host: &str, address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    Some(response)
}

#[test]
fn metrics_are_compressed_on_request() {
    let daemon = Daemon::start("gzip", "127.81.1.6");
    let plain = daemon.http("GET /metrics");
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).unwrap();
    let end = response.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let head = std::str::from_utf8(&response[..end]).unwrap();
    assert!(head.contains("content-encoding: gzip\r\n"), "{head}");
    assert!(head.contains("vary: accept-encoding\r\n"), "{head}");
    let mut text = String::new();
    let mut decoder = flate2::read::GzDecoder::new(&response[end..]);
    decoder.read_to_string(&mut text).unwrap();
    assert!(text.contains("\nriser_ready 1\n"), "{text}");
    assert!(!plain.contains("content-encoding"), "{plain}");
    assert!(response.len() * 4 < plain.len());
}

fn add(daemon: &Daemon, line: &str) {
    let file = daemon.dir.join("riserd.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{text}{line}\n")).unwrap();
}

#[test]
fn metrics_are_available_on_socket_and_tcp() {
    let daemon = Daemon::start("metrics", "127.81.1.1");
    assert!(daemon.http("GET /healthz").ends_with("\r\n\r\nok\n"));
    assert!(daemon.http("GET /readyz").ends_with("\r\n\r\nok\n"));
    let metrics = daemon.http("GET /metrics");
    assert!(metrics.contains("content-type: text/plain; version=0.0.4"));
    for line in [
        "# HELP riser_lun_size_bytes Size of a logical unit, in bytes.\n",
        "# TYPE riser_logins_total counter\n",
        "riser_lun_size_bytes{target=\"demo\",lun=\"0\"} 1048576\n",
        "riser_lun_queue_depth{target=\"demo\",lun=\"0\"} 0\n",
        "riser_lun_flush_failed{target=\"demo\",lun=\"0\"} 0\n",
        "riser_logins_total{protocol=\"srp\"} 0\n",
        "riser_device_icrc_errors_total{device=\"127.81.1.1\",provider=\"roce\",worker=\"0\"} 0\n",
        "riser_ready 1\n",
        "# TYPE riser_backend_failing gauge\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
    // By default, the daemon doesn't listen on TCP. This can be enabled and disabled in a running
    // daemon.
    assert_eq!(get(LISTEN, "/metrics"), None);
    let file = daemon.dir.join("riserd.yaml");
    let without = std::fs::read_to_string(&file).unwrap();
    add(&daemon, &format!("metrics: {{ listen: \"{LISTEN}\" }}"));
    assert!(daemon.run_command(&["reload"]).status.success());
    assert!(get(LISTEN, "/metrics").unwrap().contains("riser_ready 1"));
    assert!(get(LISTEN, "/readyz").unwrap().ends_with("ok\n"));
    let page = get(LISTEN, "/").unwrap();
    assert!(
        page.contains("content-security-policy: default-src 'none'"),
        "{page}"
    );
    // A page from another site, with a name that resolves to this address, must be rejected.
    for path in ["/", "/metrics", "/v1/live", "/readyz"] {
        let refused = get_of("example.com:9909", LISTEN, path).unwrap();
        assert!(refused.starts_with("HTTP/1.1 421 "), "{refused}");
    }
    // TCP clients only have read access.
    for path in ["/v1/config", "/v1/status", "/v1/history", "/nothing"] {
        let response = get(LISTEN, path).unwrap();
        assert!(response.starts_with("HTTP/1.1 404 "), "{path}");
        assert!(
            response.ends_with("\r\n\r\n{\"error\":\"unknown path\"}"),
            "{response}"
        );
    }
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        for path in [
            "/",
            "/metrics",
            "/v1/live",
            "/v1/config",
            "/v1/reload",
            "/v1/rescan",
        ] {
            let refused = request(method, LISTEN, LISTEN, path).unwrap();
            let is_refused = ["HTTP/1.1 404 ", "HTTP/1.1 405 "]
                .iter()
                .any(|status| refused.starts_with(status));
            assert!(is_refused, "{method} {path}: {refused}");
        }
    }
    assert!(
        daemon.run_command(&["reload"]).status.success(),
        "once more"
    );
    assert!(get(LISTEN, "/healthz").is_some());
    std::fs::write(&file, without).unwrap();
    assert!(daemon.run_command(&["reload"]).status.success());
    assert_eq!(get(LISTEN, "/healthz"), None);
}

/// The daemon takes samples continuously, and a client gets all new samples.
#[test]
fn recent_samples_and_events_are_reported_once() {
    const LISTEN: &str = "127.81.1.5:9909";
    let daemon = Daemon::start("recent", "127.81.1.5");
    add(&daemon, &format!("metrics: {{ listen: \"{LISTEN}\" }}"));
    assert!(daemon.run_command(&["reload"]).status.success());
    let body = |path: &str| -> serde_json::Value {
        let response = get(LISTEN, path).unwrap();
        serde_json::from_str(response.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    eventually("two samples", Duration::from_secs(60), || {
        body("/v1/recent")["samples"].as_array().unwrap().len() >= 2
    });
    let recent = body("/v1/recent");
    let (first, events) = (
        &recent["samples"][0]["number"],
        recent["events"].as_array().unwrap(),
    );
    assert_eq!(*first, 1);
    assert_eq!(body("/v1/recent?sample=1")["samples"][0]["number"], 2);
    assert!(
        events.iter().any(|event| event["text"]
            .as_str()
            .unwrap()
            .starts_with("configuration served")),
        "{events:?}"
    );
    let last = events.last().unwrap()["number"].as_u64().unwrap();
    let newer = body(&format!("/v1/recent?event={last}"));
    assert_eq!(newer["events"].as_array().unwrap().len(), 0);
    assert!(
        get(LISTEN, "/v1/recent?event=x")
            .unwrap()
            .starts_with("HTTP/1.1 400 ")
    );
    let live = body("/v1/live");
    assert_eq!(live["portals"][0]["is_listening"], true, "{live}");
    assert_eq!(live["backends"][0]["size"], 1 << 20, "{live}");
}

#[test]
fn unavailable_metrics_address_changes_nothing() {
    let daemon = Daemon::start("taken", "127.81.1.2");
    let taken = std::net::TcpListener::bind("127.81.1.2:0").unwrap();
    let address = taken.local_addr().unwrap();
    add(&daemon, &format!("metrics: {{ listen: \"{address}\" }}"));
    let refused = daemon.run_command(&["reload"]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("cannot listen for metrics at"), "{said}");
    assert!(said.contains("nothing was applied"), "{said}");
    assert!(daemon.json("save").get("metrics").is_none());
}

#[test]
fn remote_metrics_require_configuration() {
    let daemon = Daemon::start("remote", "127.81.1.3");
    add(&daemon, "metrics: { listen: \"0.0.0.0:9910\" }");
    let checked = Command::new(&*RISERD)
        .arg("check")
        .arg(daemon.dir.join("riserd.yaml"))
        .output()
        .unwrap();
    assert_eq!(checked.status.code(), Some(2));
    let said = String::from_utf8(checked.stderr).unwrap();
    assert!(
        said.contains("0.0.0.0:9910 is accessible from other hosts"),
        "{said}"
    );
    assert!(said.contains("remote: true"), "{said}");
}

#[test]
fn top_shows_units_for_people_and_programs() {
    let daemon = Daemon::start("top", "127.81.1.4");
    let once = ["top", "--once", "--interval", "0.1"];
    let text = String::from_utf8(daemon.run_command(&once).stdout).unwrap();
    assert!(text.contains("demo"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    let output = daemon.run_command(&[&once[..], &["-o", "json"]].concat());
    let rates: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(rates["luns"][0]["target"], "demo");
    assert_eq!(rates["total"]["commands"], 0.0);
    assert_eq!(rates["missing"], serde_json::Value::Null);
}

/// If the maximum number of clients is exceeded by clients that rarely send a byte, they must not
/// block other clients, neither on TCP nor on the admin socket.
#[test]
fn slow_clients_do_not_block_metrics() {
    const LISTEN: &str = "127.81.1.4:9909";
    let daemon = Daemon::start("slow", "127.81.1.4");
    add(&daemon, &format!("metrics: {{ listen: \"{LISTEN}\" }}"));
    assert!(daemon.run_command(&["reload"]).status.success());
    let begin = b"GET /readyz HTTP/1.1\r\nX-Slow: ";
    let mut slow: Vec<Box<dyn Write + Send>> = Vec::new();
    for _ in 0..140 {
        let mut stream = TcpStream::connect(LISTEN).unwrap();
        stream.write_all(begin).unwrap();
        slow.push(Box::new(stream));
        let mut stream = UnixStream::connect(daemon.socket()).unwrap();
        stream.write_all(begin).unwrap();
        slow.push(Box::new(stream));
    }
    let (end, ended) = mpsc::channel::<()>();
    let trickle = std::thread::spawn(move || {
        while ended.recv_timeout(Duration::from_millis(500)) == Err(RecvTimeoutError::Timeout) {
            for stream in &mut slow {
                let _ = stream.write_all(b"x");
            }
        }
    });
    for _ in 0..3 {
        for path in ["/metrics", "/readyz", "/healthz"] {
            let request =
                format!("GET {path} HTTP/1.1\r\nHost: 127.81.1.4\r\nConnection: close\r\n\r\n");
            let patience = Some(Duration::from_secs(40));
            let mut response = String::new();
            let mut tcp = TcpStream::connect(LISTEN).unwrap();
            tcp.set_read_timeout(patience).unwrap();
            tcp.write_all(request.as_bytes()).unwrap();
            tcp.read_to_string(&mut response).unwrap();
            let mut unix = UnixStream::connect(daemon.socket()).unwrap();
            unix.set_read_timeout(patience).unwrap();
            unix.write_all(request.as_bytes()).unwrap();
            unix.read_to_string(&mut response).unwrap();
            assert_eq!(response.matches("HTTP/1.1 200 ").count(), 2, "{response}");
        }
    }
    drop(end);
    trickle.join().unwrap();
}
