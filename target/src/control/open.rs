//! Opens the server, the admin socket and the metrics socket at startup.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use tokio::sync::mpsc;

use super::api::AdminRequest;
use super::history::History;
use super::http::Listening;
use super::socket::{self, Admin, SocketOrigin};
use crate::config::{Config, Location};
use crate::server::handover::ServerState;
use crate::server::{Server, ServerError, while_in_use};

/// Maximum time to wait until a killed predecessor has exited.
pub(super) const PREDECESSOR: Duration = Duration::from_secs(5);

/// Runs the start function, and retries until a predecessor has released its files and sockets.
pub(super) fn start<S>(attempt: impl FnMut() -> Result<S, ServerError>) -> Result<S, ServerError> {
    while_in_use(PREDECESSOR, attempt)
}

/// Opens the metrics listener, if configured.
pub(super) fn open_metrics(
    config: &Config,
    server_state: &ServerState,
    requests: &mpsc::Sender<AdminRequest>,
) -> Result<Option<Listening>, ServerError> {
    let Some(wanted) = &config.metrics else {
        return Ok(None);
    };
    let addr = wanted.listen;
    let opened = match server_state.socket(addr, 0) {
        Ok(Some(socket)) => {
            let fd = socket.try_clone_fd();
            fd.and_then(|fd| Listening::on(fd.into(), requests.clone()))
        }
        Ok(None) => Listening::open(addr, requests.clone()),
        Err(error) => Err(error),
    };
    let opened = opened.map_err(|source| ServerError::Metrics { addr, source });
    opened.map(Some)
}

/// Returns the configuration to use after a restart: the configuration that was last applied, or
/// the file if it has been edited since it was last read, or if nothing was applied. We compare the
/// contents, so changing a comment is not an edit.
pub(super) fn restored(file: Config, history: &History) -> Result<Config, ServerError> {
    if history.was_damaged() {
        tracing::error!(
            "the history is damaged, so the configuration file is served; changes that were not \
             saved to the file may be missing"
        );
        return Ok(file);
    }
    // As far as we know, no configuration has been applied on this host yet.
    let Some(last) = history.entries().first() else {
        return Ok(file);
    };
    let now = file.to_yaml();
    // The file only takes precedence if it has been changed since then.
    if is_edited(&now, history)? {
        tracing::warn!(
            "the configuration file has changed since it was last read, so it is served; the \
             applied configuration is in the history"
        );
        return Ok(file);
    }
    let last = parse(&last.yaml, "the last applied configuration")?;
    if last.to_yaml() != now {
        tracing::info!("serving the last applied configuration instead of the configuration file");
    }
    Ok(last)
}

/// Returns true if the configuration file has been edited since it was last read.
///
/// # Errors
/// Returns [`ServerError::State`] if the previous contents are not known.
pub(super) fn is_edited(file: &str, history: &History) -> Result<bool, ServerError> {
    let Some(seen) = history.file() else {
        // The history was written by an older version. In this case, the applied configuration is
        // more likely to be correct.
        return Ok(false);
    };
    // Another version of this program may write the same configuration in a different way.
    let seen = parse(seen, "the previous configuration file")?;
    Ok(seen.to_yaml() != file)
}

fn parse(yaml: &str, name: &str) -> Result<Config, ServerError> {
    let parsed = Config::parse(yaml, name);
    parsed.map_err(|e| ServerError::State(std::io::Error::other(e.to_string())))
}

/// Opens the admin API if configured. If it is not available, this is recorded as a problem and
/// will be retried, unless it is in use by another daemon.
pub(super) fn admin_or_problem(
    config: &Config,
    left: Option<UnixListener>,
    requests: &mpsc::Sender<AdminRequest>,
    server: &mut Server,
) -> Result<Option<Admin>, ServerError> {
    let opened = admin(&config.admin, left, requests);
    match &opened {
        Err(error @ ServerError::Admin { path, source })
            // If it is in use, another daemon is running, which is not a temporary problem. We must
            // not run at the same time.
            if !config.strict && source.kind() != ErrorKind::AddrInUse =>
        {
            server.set_admin_problem(Some((path, error)));
            Ok(None)
        }
        _ => opened,
    }
}

/// Opens the admin API on this path.
pub(super) fn admin_at(path: &Path, requests: &mpsc::Sender<AdminRequest>) -> io::Result<Admin> {
    let (listener, bound) = socket::bind(path)?;
    let admin = Admin::open(listener, Some(bound), requests.clone())?;
    tracing::info!(socket = %path.display(), "admin API");
    Ok(admin)
}

/// Opens the admin API if configured. We use the socket from the previous program or from the
/// service manager, if there is one. It is not an error if the default path is not available.
fn admin(
    wanted: &Location,
    left: Option<UnixListener>,
    requests: &mpsc::Sender<AdminRequest>,
) -> Result<Option<Admin>, ServerError> {
    let (path, is_default) = match wanted {
        Location::Off => return Ok(None),
        Location::At(path) => (Some(path.clone()), false),
        Location::Default => (socket::default_path(), true),
    };
    let inherited = match left {
        Some(listener) => Ok(Some(listener)),
        None => socket::inherited(),
    };
    let open = |listener, bound| {
        let opened = Admin::open(listener, bound, requests.clone());
        opened.map(Some).map_err(ServerError::Inherited)
    };
    if let Some(listener) = inherited.map_err(ServerError::Inherited)? {
        let place = SocketOrigin::of(&listener, path.as_deref()).map_err(ServerError::Inherited)?;
        match place {
            // A configured path overrides the service manager's socket, but the default path does
            // not, because the administrator has set the socket path in the unit file.
            SocketOrigin::Elsewhere if !is_default => {}
            SocketOrigin::Ours(bound) => {
                tracing::info!(socket = ?path, "admin API, on the existing socket");
                return open(listener, Some(bound));
            }
            SocketOrigin::Inherited | SocketOrigin::Elsewhere => {
                tracing::info!(socket = ?path, "admin API, on the service manager's socket");
                return open(listener, None);
            }
        }
    }
    let Some(path) = path else {
        tracing::warn!(
            "no admin API: XDG_RUNTIME_DIR is not set, so there is no default path for its socket; \
             set it with `admin: {{ socket: PATH }}`"
        );
        return Ok(None);
    };
    match admin_at(&path, requests) {
        Ok(admin) => Ok(Some(admin)),
        Err(error) if is_default => {
            tracing::warn!(socket = %path.display(), %error, "no admin API");
            Ok(None)
        }
        Err(source) => Err(ServerError::Admin { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::OpenError;
    use crate::control::history::Entry;

    fn locked() -> ServerError {
        ServerError::Backend {
            name: "disk".into(),
            source: OpenError::Locked {
                path: "disk.img".into(),
                holder: None,
                is_accessed: false,
                file: None,
            },
        }
    }

    fn config(target: &str) -> Config {
        let text = format!(
            "backends:\n  d: {{ kind: ram, size: 1MiB }}\ntargets:\n  - name: {target}\n    \
             portals: [{{ protocol: srp, listen: 127.0.0.1 }}]\n    luns: {{ 0: d }}\n    \
             access: open\n"
        );
        Config::parse(&text, "test.yaml").unwrap()
    }

    #[test]
    fn applied_configuration_precedes_unedited_file() {
        let mut history = History::open(&Location::Off).unwrap();
        let served = |file: &str, history: &History| {
            let config = restored(config(file), history).unwrap();
            config.targets[0].name.clone()
        };
        assert_eq!(served("file", &history), "file", "nothing was applied");
        let applied = Entry::now("me", "apply", config("applied").to_yaml());
        history.record(applied).unwrap();
        assert_eq!(served("file", &history), "applied", "of an older daemon");
        history.see_file(config("file").to_yaml()).unwrap();
        assert_eq!(served("file", &history), "applied");
        assert_eq!(served("edited", &history), "edited");
        history.see_file(config("edited").to_yaml()).unwrap();
        assert_eq!(served("edited", &history), "applied");
    }

    #[test]
    fn start_waits_only_for_resources_in_use() {
        let mut attempts = 0;
        let started = start(|| {
            attempts += 1;
            if attempts < 3 { Err(locked()) } else { Ok(()) }
        });
        assert!(started.is_ok() && attempts == 3);
        let mut attempts = 0;
        let refused = start(|| {
            attempts += 1;
            Err::<(), _>(ServerError::Flush("no".into()))
        });
        assert!(refused.is_err() && attempts == 1);
    }
}
