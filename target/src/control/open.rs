//! Opens what the control plane needs at its start: the server, the admin socket, the socket of
//! metrics.

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

/// Longest time that a killed predecessor may take to be gone.
pub(super) const PREDECESSOR: Duration = Duration::from_secs(5);

/// Starts, and waits until a predecessor has released its files and sockets.
pub(super) fn start<S>(attempt: impl FnMut() -> Result<S, ServerError>) -> Result<S, ServerError> {
    while_in_use(PREDECESSOR, attempt)
}

/// Listens for those who want metrics, if the configuration says so.
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

/// Configuration to serve after a restart: the one that was applied last, unless the file has been
/// edited since it was read last, or nothing was applied. It is the file's meaning that counts: a
/// comment is no edit.
pub(super) fn restored(file: Config, history: &History) -> Result<Config, ServerError> {
    // Nothing was applied yet, as far as this host remembers.
    let Some(last) = history.entries().first() else {
        return Ok(file);
    };
    let now = file.to_yaml();
    // The file is the administrator's last word only if he has changed it since.
    if is_edited(&now, history)? {
        tracing::warn!(
            "the configuration file has changed since it was read last, so it is served; \
             what was applied is in the history"
        );
        return Ok(file);
    }
    let last = parse(&last.yaml, "the configuration applied last")?;
    if last.to_yaml() != now {
        tracing::info!("serving the configuration that was applied last, not the file's");
    }
    Ok(last)
}

/// Returns true if the configuration file, which says this, has been edited since it was read
/// last.
///
/// # Errors
/// [`ServerError::State`]: it is not known what it said then.
pub(super) fn is_edited(file: &str, history: &History) -> Result<bool, ServerError> {
    let Some(seen) = history.file() else {
        // A history of an older version: what was applied is then the better guess.
        return Ok(false);
    };
    // Another version of this program may write the same configuration in another way.
    let seen = parse(seen, "the configuration file as it was read last")?;
    Ok(seen.to_yaml() != file)
}

fn parse(yaml: &str, name: &str) -> Result<Config, ServerError> {
    let parsed = Config::parse(yaml, name);
    parsed.map_err(|e| ServerError::State(std::io::Error::other(e.to_string())))
}

/// Opens the admin API where the configuration wants it, or goes on without it: what cannot be had
/// is a problem, and tried again, unless a daemon that runs has it.
pub(super) fn admin_or_problem(
    config: &Config,
    left: Option<UnixListener>,
    requests: &mpsc::Sender<AdminRequest>,
    server: &mut Server,
) -> Result<Option<Admin>, ServerError> {
    let opened = admin(&config.admin, left, requests);
    match &opened {
        Err(error @ ServerError::Admin { path, source })
            // In use means that another daemon has it, which is no fault that goes by: this one
            // must not run beside it.
            if !config.strict && source.kind() != ErrorKind::AddrInUse =>
        {
            server.set_admin_problem(Some((path, error)));
            Ok(None)
        }
        _ => opened,
    }
}

/// Opens the admin API at a path.
pub(super) fn admin_at(path: &Path, requests: &mpsc::Sender<AdminRequest>) -> io::Result<Admin> {
    let (listener, bound) = socket::bind(path)?;
    let admin = Admin::open(listener, Some(bound), requests.clone())?;
    tracing::info!(socket = %path.display(), "admin API");
    Ok(admin)
}

/// Opens the admin API where the configuration wants it, by a socket that was left to us or that
/// the service manager has, if it is there. A default place that cannot be had is no reason not to
/// serve.
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
            // A path in the configuration counts more than the service manager's socket; a default
            // does not, since the administrator has chosen the socket's place by the unit.
            SocketOrigin::Elsewhere if !is_default => {}
            SocketOrigin::Ours(bound) => {
                tracing::info!(socket = ?path, "admin API, on the socket that was there");
                return open(listener, Some(bound));
            }
            SocketOrigin::Given | SocketOrigin::Elsewhere => {
                tracing::info!(socket = ?path, "admin API, on the service manager's socket");
                return open(listener, None);
            }
        }
    }
    let Some(path) = path else {
        tracing::warn!(
            "no admin API: XDG_RUNTIME_DIR is not set, so there is no default place for its socket; \
             `admin: {{ socket: PATH }}` names one"
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
    fn what_was_applied_comes_before_a_file_that_was_not_edited() {
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
    fn a_start_waits_for_what_is_in_use_and_for_nothing_else() {
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
