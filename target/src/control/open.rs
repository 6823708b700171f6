//! What the control plane opens at its start: the server, the admin socket, the socket of metrics.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::api::Request;
use super::http::Listening;
use super::socket::{self, Admin, Place};
use crate::config::{Config, Location};
use crate::server::ServerError;
use crate::server::legacy::Legacy;

/// How long a daemon that was killed before may take to be gone altogether.
const PREDECESSOR: Duration = Duration::from_secs(5);

/// Starts, and waits for a predecessor to let go of what it had.
pub(super) fn start<S>(
    mut attempt: impl FnMut() -> Result<S, ServerError>,
) -> Result<S, ServerError> {
    let until = Instant::now() + PREDECESSOR;
    let mut told = false;
    loop {
        match attempt() {
            Err(error) if error.is_in_use() && Instant::now() < until => {
                if !told {
                    tracing::info!(%error, "waiting");
                    told = true;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            end => return end,
        }
    }
}

/// Listens for those who want metrics, if the configuration says so.
pub(super) fn open_metrics(
    config: &Config,
    legacy: &Legacy,
    requests: &mpsc::Sender<Request>,
) -> Result<Option<Listening>, ServerError> {
    let Some(wanted) = &config.metrics else {
        return Ok(None);
    };
    let addr = wanted.listen;
    let opened = match legacy.socket(addr, 0) {
        Ok(Some(socket)) => Listening::on(OwnedFd::from(socket).into(), requests.clone()),
        Ok(None) => Listening::open(addr, requests.clone()),
        Err(error) => Err(error),
    };
    let opened = opened.map_err(|source| ServerError::Metrics { addr, source });
    opened.map(Some)
}

/// The configuration that was applied last.
pub(super) fn restored(yaml: &str) -> Result<Config, ServerError> {
    let config = Config::parse(yaml, "the configuration applied last");
    config.map_err(|e| ServerError::State(std::io::Error::other(e.to_string())))
}

/// Opens the admin API where the configuration wants it, by a socket that was left to us or that the
/// service manager has, if it is there. A default place that cannot be had is no reason not to serve.
pub(super) fn admin(
    wanted: &Location,
    left: Option<UnixListener>,
    requests: mpsc::Sender<Request>,
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
        let place = Place::of(&listener, path.as_deref()).map_err(ServerError::Inherited)?;
        match place {
            Place::Elsewhere if !is_default => {}
            Place::Ours(bound) => {
                tracing::info!(socket = ?path, "admin API, on the socket that was there");
                return open(listener, Some(bound));
            }
            Place::Given | Place::Elsewhere => {
                tracing::info!(socket = ?path, "admin API, on the service manager's socket");
                return open(listener, None);
            }
        }
    }
    let Some(path) = path else {
        return Ok(None);
    };
    match socket::bind(&path) {
        Ok((listener, bound)) => {
            tracing::info!(socket = %path.display(), "admin API");
            open(listener, Some(bound))
        }
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

    fn locked() -> ServerError {
        ServerError::Backend {
            name: "disk".into(),
            source: OpenError::Locked {
                path: "disk.img".into(),
            },
        }
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
