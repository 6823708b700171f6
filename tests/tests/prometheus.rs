//! Uses Prometheus to check the metrics of `riserd`, our alert rules, and all expressions in our
//! dashboard while the daemon is under load.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use riser_testkit::metered::{Metered, Running, get, load};
use riser_testkit::programs::{missing, skip, succeeded};
use riser_testkit::{eventually_ok, eventually_some};
use serde_json::Value;

const PROMETHEUS: &str = "127.0.109.1:9990";
const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/prometheus/");
const DASHBOARD: &str = include_str!("../../deploy/grafana/riserd.json");

/// Sends a login to an iSCSI target. Returns the connection and the login status.
fn log_in(host: &str, target: &str) -> (TcpStream, u8) {
    let keys = format!(
        "InitiatorName=iqn.2026-01.com.example:me\0SessionType=Normal\0TargetName={target}\0"
    );
    let mut pdu = vec![0u8; 48];
    // A login request with a transition from operational negotiation to the full feature phase.
    (pdu[0], pdu[1], pdu[7], pdu[8]) = (0x43, 0x87, keys.len() as u8, 0x80);
    pdu.extend(keys.as_bytes());
    pdu.resize(pdu.len().next_multiple_of(4), 0);
    let mut stream = TcpStream::connect((host, 3260)).unwrap();
    stream.write_all(&pdu).unwrap();
    let response = receive(&mut stream);
    (stream, response[36])
}

fn receive(stream: &mut TcpStream) -> [u8; 48] {
    let mut bhs = [0; 48];
    stream.read_exact(&mut bhs).unwrap();
    let len = usize::from(bhs[6]) << 8 | usize::from(bhs[7]);
    let mut data = vec![0; len.next_multiple_of(4)];
    stream.read_exact(&mut data).unwrap();
    bhs
}

/// Triggers rare events: a failed login, a task management request, and a command that fails.
fn rare_events(served: &Metered) {
    let (_, status) = log_in(&served.host, "iqn.2026-01.com.example:absent");
    assert_eq!(status, 2, "there is no such target");
    let (mut stream, status) = log_in(&served.host, &served.iqn);
    assert_eq!(status, 0);
    let mut pdu = [0u8; 48];
    // LOGICAL UNIT RESET, immediate.
    (pdu[0], pdu[1], pdu[19]) = (0x42, 0x85, 9);
    pdu[20..24].fill(0xff);
    stream.write_all(&pdu).unwrap();
    let response = receive(&mut stream);
    assert_eq!(
        (response[0], response[2]),
        (0x22, 0),
        "the function is complete"
    );
    // A command with an unknown operation code, after two unit attentions.
    let mut pdu = [0u8; 48];
    (pdu[0], pdu[1], pdu[19], pdu[32]) = (0x41, 0x81, 10, 0xff);
    for _ in 0..3 {
        stream.write_all(&pdu).unwrap();
        let response = receive(&mut stream);
        assert_eq!((response[0], response[3]), (0x21, 2), "CHECK CONDITION");
    }
}

/// Percent-encodes a query.
fn encoded(text: &str) -> String {
    let byte = |b: u8| match b {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(b).to_string(),
        _ => format!("%{b:02X}"),
    };
    text.bytes().map(byte).collect()
}

fn query(expression: &str) -> Vec<Value> {
    let path = format!("/api/v1/query?query={}", encoded(expression));
    let response = get(PROMETHEUS, &path).unwrap_or_else(|| panic!("refused: {expression}"));
    let response: Value = serde_json::from_str(&response).unwrap();
    response["data"]["result"].as_array().unwrap().clone()
}

/// Returns the expressions and titles of all panels.
fn expressions() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut all = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let expression = expression
                .replace("$__rate_interval", "15s")
                .replace("$target", ".*")
                .replace("$instance", ".*");
            let title = panel["title"].as_str().unwrap().to_owned();
            all.push((title, expression));
        }
    }
    assert!(all.len() > 20);
    all
}

#[test]
fn rules_pass_their_tests() {
    let name = "rules_pass_their_tests";
    if let Some(tool) = missing(&["promtool"]) {
        return skip(name, &format!("no {tool}"));
    }
    for args in [
        &["check", "rules", "riserd.rules.yml"][..],
        &["check", "config", "prometheus.yml"],
        &["test", "rules", "riserd.test.yml"],
    ] {
        succeeded(Command::new("promtool").args(args).current_dir(RULES));
    }
}

/// A dashboard can show several hosts, so all queries must be grouped by instance, and each legend
/// must contain the host.
#[test]
fn panels_group_by_instance() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert!(
        variables
            .iter()
            .any(|variable| variable["name"] == "instance")
    );
    for panel in dashboard["panels"].as_array().unwrap() {
        let of_sums = matches!(panel["type"].as_str(), Some("stat" | "heatmap"));
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let is_name = |word: &&str| {
                let names = ["riser_", "process_", "ALERTS"];
                names.iter().any(|name| word.starts_with(name)) && !word.ends_with('"')
            };
            let words = expression.split_inclusive(|c: char| !(c.is_alphanumeric() || c == '_'));
            let metrics = words.filter(is_name).count();
            let chosen = expression.matches("{instance=~\"$instance\"").count();
            assert!(metrics > 0 && metrics == chosen, "{expression}");
            let legend = target["legendFormat"].as_str().unwrap_or_default();
            assert!(of_sums || legend.starts_with("{{instance}} "), "{panel}");
        }
    }
}

/// Shared memory is not a network, although its series use the same names.
#[test]
fn network_panels_exclude_shared_memory() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array());
    let expressions = targets
        .flatten()
        .map(|target| target["expr"].as_str().unwrap());
    let of_devices: Vec<_> = expressions
        .filter(|e| e.contains("riser_device_"))
        .collect();
    assert!(of_devices.len() > 5);
    for expression in of_devices {
        assert!(expression.contains("provider!=\"shm\""), "{expression}");
    }
}

/// Returns the names of our alerts.
fn alerts() -> Vec<String> {
    let rules = fs::read_to_string(format!("{RULES}riserd.rules.yml")).unwrap();
    let names = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let names: Vec<_> = names.map(str::to_owned).collect();
    assert!(names.len() > 10);
    names
}

/// There must be a test for every alert, both firing and not firing.
#[test]
fn alerts_have_tests() {
    let tests = fs::read_to_string(format!("{RULES}riserd.test.yml")).unwrap();
    for alert in alerts() {
        let case = format!("alertname: {alert}\n        exp_alerts:");
        let cases = || tests.split(&case).skip(1);
        assert!(
            cases().any(|case| case.starts_with(" []")),
            "{alert} when it is silent"
        );
        assert!(
            cases().any(|case| case.starts_with("\n")),
            "{alert} when it fires"
        );
    }
}

#[test]
fn dashboard_panels_show_data_under_load() {
    let name = "dashboard_panels_show_data_under_load";
    if let Some(tool) = missing(&["prometheus", "promtool"]) {
        return skip(name, &format!("no {tool}"));
    }
    let served = Metered::serve(109);
    let (pair, riserd) = (&served.pair, &served.metrics);
    let config = format!(
        "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\n\
         rule_files: [\"{RULES}riserd.rules.yml\"]\n\
         scrape_configs:\n  - job_name: riserd\n    static_configs: [{{ targets: [\"{riserd}\"] }}]\n"
    );
    fs::write(pair.path("prometheus.yml"), config).unwrap();
    let log = fs::File::create(pair.path("prometheus.log")).unwrap();
    let _prometheus = Running(
        Command::new("prometheus")
            .arg(format!("--config.file={}", pair.path("prometheus.yml")))
            .arg(format!("--storage.tsdb.path={}", pair.path("tsdb")))
            .arg(format!("--web.listen-address={PROMETHEUS}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap(),
    );
    let wait = Duration::from_secs(60);
    eventually_some("Prometheus", wait, || get(PROMETHEUS, "/-/ready"));
    eventually_some("a scrape", wait, || query("up == 1").pop());
    let _load = load(pair, 60);
    rare_events(&served);
    // To calculate a rate, Prometheus needs two samples of an existing series.
    eventually_some("rates", wait, || {
        query("rate(riser_commands_total{op=\"write\"}[15s]) > 0").pop()
    });
    let mut empty = expressions();
    let until = Instant::now() + Duration::from_secs(20);
    while !empty.is_empty() && Instant::now() < until {
        empty.retain(|(_, expression)| query(expression).is_empty());
        thread::sleep(Duration::from_millis(200));
    }
    assert!(empty.is_empty(), "nothing to show: {empty:#?}");

    let metrics = get(riserd, "/metrics").unwrap();
    let mut check = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    check
        .stdin
        .take()
        .unwrap()
        .write_all(metrics.as_bytes())
        .unwrap();
    let checked = check.wait_with_output().unwrap();
    assert!(checked.status.success(), "{checked:?}");

    // If this machine stalls for a moment, an alert can be pending until it resumes.
    let wait = Duration::from_secs(30);
    let alerts = alerts().len();
    eventually_ok("no alert under load", wait, || {
        let rules = get(PROMETHEUS, "/api/v1/rules").ok_or("no response".to_owned())?;
        let rules: Value = serde_json::from_str(&rules).unwrap();
        let rules = rules["data"]["groups"][0]["rules"].as_array().unwrap();
        assert_eq!(rules.len(), alerts);
        let is_quiet = |rule: &&Value| rule["health"] == "ok" && rule["state"] == "inactive";
        match rules.iter().find(|rule| !is_quiet(rule)) {
            Some(rule) => Err(rule.to_string()),
            None => Ok(()),
        }
    });
}
