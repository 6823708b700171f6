//! Metrics, health and the status page over HTTP, read-only. All of it is on the admin socket as
//! well; on a TCP address only if the configuration says so.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, on};
use serde_json::Value;

use super::api::{Answer, Ask, Failure, Peer, Requests, error, forward, said};
use super::bounded::{Bounded, Limits};
use super::metrics;
use super::serving::Serving;
use super::timeline::Since;

/// The status page: one file that needs no other.
const PAGE: &str = include_str!("page.html");

/// Limits of the connections to an address. Prometheus is idle for less between two scrapes, as a
/// rule.
const LIMITS: Limits = Limits {
    connections: 64,
    request: Duration::from_secs(10),
    answer: Duration::from_secs(30),
    idle: Duration::from_secs(60),
};

/// Content policy of the page, which has everything in it and loads only data of ours.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Routes of the server for Prometheus and the status page.
pub fn router() -> Router<Requests> {
    Router::new()
        .route("/", on(MethodFilter::GET, page))
        .route("/metrics", on(MethodFilter::GET, scrape))
        .route("/healthz", on(MethodFilter::GET, healthz))
        .route("/readyz", on(MethodFilter::GET, readyz))
        .route("/v1/live", on(MethodFilter::GET, live))
        .route("/v1/recent", on(MethodFilter::GET, recent))
}

/// Returns true if a `Host` header names this host and no other: by an address, as `localhost`, or
/// by the host's own name. A page of another site that a browser here shows may have its own name
/// lead to this address (DNS rebinding); what it asks for then names that site.
fn is_own(host: &str, own: &str) -> bool {
    // The last colon only if digits follow, since an IPv6 address has colons of its own.
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    // An attacker's name cannot be an address: rebinding needs a name that he has resolved.
    let is_address = bare.unwrap_or(name).parse::<IpAddr>().is_ok();
    is_address || name.eq_ignore_ascii_case("localhost") || name.eq_ignore_ascii_case(own)
}

/// Rejects requests whose `Host` is not this host.
async fn check_host(request: Request, next: Next) -> Response {
    let uname = rustix::system::uname();
    let own = uname.nodename().to_str().unwrap_or("localhost");
    // Two headers are refused: a proxy and we could each believe another one.
    let mut hosts = request.headers().get_all(HOST).iter();
    let is_meant = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host.to_str().is_ok_and(|host| is_own(host, own)),
        // A browser always says it.
        (None, _) => true,
        _ => false,
    };
    if is_meant {
        return next.run(request).await;
    }
    let why = "use the IP address, localhost or the host name in the URL";
    error(StatusCode::MISDIRECTED_REQUEST, why)
}

async fn page() -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY),
        // The page of one version must not talk to the API of the next one.
        (CACHE_CONTROL, "no-store"),
    ];
    (headers, PAGE).into_response()
}

async fn live(State(requests): State<Requests>, ConnectInfo(peer): ConnectInfo<Peer>) -> Response {
    said(forward(&requests, Ask::Live, peer).await)
}

async fn recent(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(since): Query<Since>,
) -> Response {
    said(forward(&requests, Ask::Recent(since), peer).await)
}

pub(super) async fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "there is no such path")
}

async fn scrape(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
) -> Response {
    match forward(&requests, Ask::Metrics, peer).await {
        Ok(Value::String(text)) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        answer => said(answer),
    }
}

/// The control plane answers, so no worker has failed: the daemon would be ending.
async fn healthz(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
) -> Response {
    word(forward(&requests, Ask::Health, peer).await)
}

async fn readyz(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
) -> Response {
    word(forward(&requests, Ask::Ready, peer).await)
}

fn word(answer: Answer) -> Response {
    match answer {
        Ok(_) => "ok\n".into_response(),
        Err(Failure::Refused { why, .. }) => {
            (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response()
        }
        Err(failure) => error(StatusCode::SERVICE_UNAVAILABLE, &failure.to_string()),
    }
}

/// A listener; it ends when it is dropped.
#[derive(Debug)]
pub struct Listening {
    addr: SocketAddr,
    listener: TcpListener,
    serving: Serving,
}

impl Listening {
    /// Listens at an address. Must be called on the control plane's runtime.
    ///
    /// # Errors
    /// Those of `bind(2)`.
    pub fn open(addr: SocketAddr, requests: Requests) -> io::Result<Self> {
        Self::on(TcpListener::bind(addr)?, requests)
    }

    /// Answers at a socket that listens. Must be called on the control plane's runtime.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn on(listener: TcpListener, requests: Requests) -> io::Result<Self> {
        let addr = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let socket = tokio::net::TcpListener::from_std(listener.try_clone()?)?;
        let mut router = router().fallback(not_found).with_state(requests);
        // What other hosts may reach is no secret to their browsers' pages either, and has names
        // that are not known here.
        if addr.ip().is_loopback() {
            router = router.layer(from_fn(check_host));
        }
        let bounded = Bounded::new(socket, LIMITS);
        let router = router.into_make_service_with_connect_info::<Peer>();
        let serving =
            Serving::spawn(|end| axum::serve(bounded, router).with_graceful_shutdown(end));
        tracing::info!(%addr, "metrics and status page");
        Ok(Self {
            addr,
            listener,
            serving,
        })
    }

    /// Ends it but not the socket: who connects waits.
    pub async fn end(self) -> TcpListener {
        self.serving.end().await;
        self.listener
    }

    /// Address that it is bound to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_sites_are_not_ours() {
        let is_ours = |host| is_own(host, "storage-1");
        for host in [
            "127.0.0.1",
            "127.0.0.1:9909",
            "[::1]:9909",
            "[::1]",
            "LocalHost:9909",
            "storage-1:9909",
        ] {
            assert!(is_ours(host), "{host}");
        }
        for host in [
            "example.com:9909",
            "127.0.0.1.example.com",
            "localhost.example.com:9909",
            "storage-1.example.com",
            "",
            ":9909",
        ] {
            assert!(!is_ours(host), "{host}");
        }
    }
}
