//! Fuzz target for the admin API, from client bytes to daemon requests. The daemon in this test
//! only stores a configuration.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use riser_config::{Config, Patch, diff};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::api::{AdminCommand, AdminRequest, AdminResult, Failure, Kept, Proposal};
use super::revision;
use super::socket::Admin;
use super::trace::Wanted;

const CONFIG: &str = "\
backends: { disk: { kind: file, path: /var/lib/disk.img, size: 1GiB, create: true } }
targets:
  - name: demo
    portals: [{ protocol: srp, listen: 127.0.0.1 }]
    luns: { 0: disk }
    access: [{ initiator: 0002:c903:00a1:b2c3, luns: [0] }]
";

/// Methods and paths. We don't include traces, because they would take too long.
const ROUTES: [(&str, &str); 17] = [
    ("PUT", "/v1/config"),
    ("PATCH", "/v1/config"),
    ("POST", "/v1/diff"),
    ("POST", "/v1/rollback"),
    ("GET", "/v1/config"),
    ("POST", "/v1/upgrade"),
    ("POST", "/v1/clear-flush-failure"),
    ("GET", "/v1/scrubs"),
    ("POST", "/v1/scrub?rate=1"),
    ("POST", "/v1/stop-scrub"),
    ("POST", "/v1/disconnect"),
    ("POST", "/v1/unblock"),
    ("GET", "/v1/recent?sample=1&event=2"),
    ("GET", "/metrics"),
    ("POST", "/v1/reload"),
    ("DELETE", "/v1/config"),
    ("GET", "/v1/nothing"),
];

/// Separator between parts of the input. Each part is a request.
const END: u8 = 0xff;

/// Last request of a connection, after which the server closes the connection.
const LAST: &[u8] = b"GET /v1/config HTTP/1.1\r\nHost: riserd\r\nConnection: close\r\n\r\n";

/// A daemon without any objects.
struct Daemon {
    config: Config,
}

impl Daemon {
    fn new() -> Self {
        let config = Config::parse(CONFIG, "fuzz.yaml").unwrap();
        Self { config }
    }

    /// Returns the proposed configuration. We verify that it can be written and parsed again, and
    /// that its JSON does not change it.
    fn proposed(&self, proposal: &Proposal) -> Result<Config, Failure> {
        let config = match proposal {
            Proposal::Whole(text) => {
                Config::parse(text, "configuration").map_err(|e| e.to_string())
            }
            Proposal::Patch(patch) => patch.apply(&self.config).map_err(|e| e.to_string()),
        };
        let config = config.map_err(Failure::Mistake)?;
        let again = Config::parse(&config.to_yaml(), "again").map_err(|e| e.to_string());
        assert_eq!(again.as_ref(), Ok(&config), "{}", config.to_yaml());
        let same = Patch::Merge(config.to_value()).apply(&config);
        assert_eq!(same.map_err(|e| e.to_string()), Ok(config.clone()));
        Ok(config)
    }

    fn execute(&mut self, command: AdminCommand) -> AdminResult {
        let yaml = self.config.to_yaml();
        match command {
            AdminCommand::Config => {
                let (revision, json) = (revision(&yaml), self.config.to_value());
                let kept = Kept {
                    revision,
                    yaml,
                    json,
                };
                Ok(serde_json::to_value(kept).unwrap())
            }
            AdminCommand::Apply {
                proposal, replaces, ..
            } => {
                if replaces.is_some_and(|wanted| wanted != revision(&yaml)) {
                    return Err(Failure::Outdated);
                }
                self.config = self.proposed(&proposal)?;
                Ok(Value::Null)
            }
            AdminCommand::Diff(proposal) => {
                let proposed = self.proposed(&proposal)?;
                let changes = diff(&self.config, &proposed);
                assert_eq!(changes.is_empty(), proposed == self.config, "{changes:?}");
                Ok(Value::Null)
            }
            AdminCommand::Metrics => Ok(json!("a 1\n")),
            _ => Ok(Value::Null),
        }
    }
}

/// Returns the request for this part: route, headers and body.
fn request(part: &[u8]) -> Vec<u8> {
    let [route, headers, body @ ..] = part else {
        return part.to_vec();
    };
    let Some((method, path)) = ROUTES.get(usize::from(*route)) else {
        return part[1..].to_vec();
    };
    let mut out = format!("{method} {path} HTTP/1.1\r\nHost: riserd\r\n");
    out += match headers & 7 {
        0 => "",
        1 => "Content-Type: application/merge-patch+json\r\n",
        2 => "Content-Type: application/json-patch+json\r\n",
        3 => "Content-Type: Application/Merge-Patch+JSON; a=b\r\n",
        _ => "Content-Type: text/plain\r\nAccept: application/json\r\n",
    };
    let own = revision(&Daemon::new().config.to_yaml());
    out += &match headers >> 3 & 3 {
        0 => String::new(),
        1 => format!("If-Match: \"{own}\"\r\n"),
        2 => "If-Match: *\r\n".to_owned(),
        _ => "If-Match: \"another\"\r\n".to_owned(),
    };
    let mut bytes = match headers & 0x80 {
        0 => format!("{out}Content-Length: {}\r\n\r\n", body.len()),
        _ => format!(
            "{out}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n",
            body.len()
        ),
    }
    .into_bytes();
    bytes.extend_from_slice(body);
    if headers & 0x80 != 0 {
        bytes.extend_from_slice(if body.is_empty() {
            b"\r\n"
        } else {
            b"\r\n0\r\n\r\n"
        });
    }
    bytes
}

/// A server with its request queue.
struct Rig {
    runtime: tokio::runtime::Runtime,
    address: SocketAddr,
    received: mpsc::Receiver<AdminRequest>,
    _admin: Admin,
}

impl Rig {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        static RIGS: AtomicUsize = AtomicUsize::new(0);
        let number = RIGS.fetch_add(1, Ordering::Relaxed);
        let name = format!("riser-fuzz-{}-{number}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let (requests, received) = mpsc::channel(16);
        let entered = runtime.enter();
        let admin = Admin::open(listener, None, requests).unwrap();
        drop(entered);
        Self {
            runtime,
            address,
            received,
            _admin: admin,
        }
    }

    /// Sends these bytes to the server and returns the response, while the daemon handles requests.
    /// If the input is incomplete, the server may wait for more data. In this case, the client
    /// closes its side, and the server may close the connection without a response.
    fn exchange(&mut self, bytes: &[u8], is_whole: bool, daemon: &mut Daemon) -> Vec<u8> {
        let stream = UnixStream::connect_addr(&self.address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let received = &mut self.received;
        self.runtime.block_on(async {
            let (mut from, mut to) = tokio::net::UnixStream::from_std(stream)
                .unwrap()
                .into_split();
            let client = async {
                // The server can close the connection before it has received all data.
                let _ = to.write_all(bytes).await;
                if !is_whole {
                    let _ = to.shutdown().await;
                }
                let mut response = Vec::new();
                let _ = from.read_to_end(&mut response).await;
                response
            };
            tokio::pin!(client);
            loop {
                tokio::select! {
                    response = &mut client => return response,
                    Some(AdminRequest { command, reply, .. }) = received.recv() => {
                        let _ = reply.send(daemon.execute(command));
                    }
                }
            }
        })
    }
}

/// Handles arbitrary requests. The server must return valid HTTP and no internal errors, and then
/// return the last accepted configuration.
fn check(rig: &mut Rig, bytes: &[u8]) {
    if let Ok(wanted) = serde_json::from_slice::<Wanted>(bytes) {
        let _ = wanted.check();
    }
    let requests: Vec<u8> = bytes.split(|byte| *byte == END).flat_map(request).collect();
    if requests.windows(5).any(|word| word == b"trace") {
        return;
    }
    let mut daemon = Daemon::new();
    let is_raw = |part: &[u8]| part.len() < 2 || usize::from(part[0]) >= ROUTES.len();
    let is_whole = !bytes.split(|byte| *byte == END).any(is_raw);
    let response = rig.exchange(&[&requests, LAST].concat(), is_whole, &mut daemon);
    let text = String::from_utf8_lossy(&response);
    assert!(
        response.is_empty() || response.starts_with(b"HTTP/1."),
        "{text}"
    );
    assert!(!response.starts_with(b"HTTP/1.1 5"), "{text}");
    let response = rig.exchange(LAST, true, &mut daemon);
    let text = String::from_utf8(response).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert_eq!(Config::parse(body, "kept").unwrap(), daemon.config);
}

#[test]
fn admin_api() {
    let rig = Mutex::new(Rig::new());
    bolero::check!(name = "admin_api").for_each(|bytes: &[u8]| {
        let mut rig = rig.lock().unwrap_or_else(PoisonError::into_inner);
        check(&mut rig, bytes);
    });
}

/// Verifies that the fuzz target can reach the configuration.
#[test]
fn fuzz_target_requests_change_configuration() {
    let (mut rig, mut daemon) = (Rig::new(), Daemon::new());
    let bytes = request(b"\x01\x09{\"limits\":{\"max_sessions\":7}}");
    let response = rig.exchange(&[&bytes, LAST].concat(), true, &mut daemon);
    assert!(response.starts_with(b"HTTP/1.1 200"), "{response:?}");
    assert_ne!(daemon.config, Daemon::new().config);
}
