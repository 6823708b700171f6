//! Read-only HTTP access to metrics, health and the status page. It is always available via the
//! admin socket, and via TCP if an address is configured.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST,
    VARY,
};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, on};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;

use super::api::{AdminCommand, AdminResult, Failure, Peer, Requests, error, forward, to_response};
use super::bounded::{Bounded, Limits};
use super::metrics;
use super::serving::Serving;
use super::timeline::Since;

/// The status page, which is a single file.
const PAGE: &str = include_str!("page.html");

/// Connection limits for a TCP address. The idle timeout should be longer than the usual Prometheus
/// scrape interval.
const LIMITS: Limits = Limits {
    connections: 64,
    request: Duration::from_secs(10),
    response: Duration::from_secs(30),
    idle: Duration::from_secs(60),
};

/// Content security policy. The page is self-contained, and only loads our own data.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Creates the routes for Prometheus and the status page.
pub fn router() -> Router<Requests> {
    Router::new()
        .route("/", on(MethodFilter::GET, page))
        .route("/metrics", on(MethodFilter::GET, scrape))
        .route("/healthz", on(MethodFilter::GET, healthz))
        .route("/readyz", on(MethodFilter::GET, readyz))
        .route("/v1/live", on(MethodFilter::GET, live))
        .route("/v1/recent", on(MethodFilter::GET, recent))
}

/// Returns true if a `Host` header refers to this host: by address, as `localhost`, or with the
/// host name. A page from another site in a local browser could resolve its own name to this
/// address (DNS rebinding), but its requests will contain the name of that site.
fn is_own(host: &str, own: &str) -> bool {
    // Only split at the last colon if it is followed by digits, because IPv6 addresses contain
    // colons too.
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    // An attacker cannot use an address, because rebinding requires a name that was resolved by the
    // attacker.
    let is_address = bare.unwrap_or(name).parse::<IpAddr>().is_ok();
    is_address || name.eq_ignore_ascii_case("localhost") || name.eq_ignore_ascii_case(own)
}

/// Rejects requests if the `Host` is not this host.
async fn check_host(request: Request, next: Next) -> Response {
    let uname = rustix::system::uname();
    let own = uname.nodename().to_str().unwrap_or("localhost");
    // We reject duplicate headers, because a proxy could use a different one than we do.
    let mut hosts = request.headers().get_all(HOST).iter();
    let is_meant = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host.to_str().is_ok_and(|host| is_own(host, own)),
        // Browsers always send this header.
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
        // A page from an old version must not use the API of a new version.
        (CACHE_CONTROL, "no-store"),
    ];
    (headers, PAGE).into_response()
}

async fn live(State(requests): State<Requests>, ConnectInfo(peer): ConnectInfo<Peer>) -> Response {
    to_response(forward(&requests, AdminCommand::Live, peer).await)
}

async fn recent(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(since): Query<Since>,
) -> Response {
    to_response(forward(&requests, AdminCommand::Recent(since), peer).await)
}

pub(super) async fn not_found() -> Response {
    error(StatusCode::NOT_FOUND, "unknown path")
}

async fn scrape(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
) -> Response {
    let text = match forward(&requests, AdminCommand::Metrics, peer).await {
        Ok(Value::String(text)) => text,
        result => return to_response(result),
    };
    let common = [
        (CONTENT_TYPE, metrics::CONTENT_TYPE),
        (VARY, ACCEPT_ENCODING.as_str()),
    ];
    if !accepts_gzip(&headers) {
        return (common, text).into_response();
    }
    match gzip(&text).await {
        Ok(bytes) => (common, [(CONTENT_ENCODING, "gzip")], bytes).into_response(),
        Err(error) => to_response(Err(Failure::Failed(error.to_string()))),
    }
}

/// Returns true if the client accepts gzip content encoding (RFC 9110 12.5.3).
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter();
    let codings = values.filter_map(|value| value.to_str().ok());
    let mut codings = codings.flat_map(|value| value.split(','));
    codings.any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_gzip = parts
            .next()
            .is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let mut weights = parts.filter_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok());
        is_gzip && weights.all(|weight| weight > 0.0)
    })
}

/// Number of bytes to compress before yielding to other tasks of the control plane.
const COMPRESSED_AT_ONCE: usize = 64 << 10;

/// Compresses a text. We use a fast level because metrics are very repetitive.
async fn gzip(text: &str) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    for chunk in text.as_bytes().chunks(COMPRESSED_AT_ONCE) {
        encoder.write_all(chunk)?;
        tokio::task::yield_now().await;
    }
    encoder.finish()
}

/// If the control plane responds, no worker has failed, because then the daemon would be
/// terminating.
async fn healthz(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
) -> Response {
    word(forward(&requests, AdminCommand::Health, peer).await)
}

async fn readyz(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
) -> Response {
    word(forward(&requests, AdminCommand::Ready, peer).await)
}

fn word(result: AdminResult) -> Response {
    match result {
        Ok(_) => "ok\n".into_response(),
        Err(Failure::Refused { why, .. }) => {
            (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response()
        }
        Err(failure) => error(StatusCode::SERVICE_UNAVAILABLE, &failure.to_string()),
    }
}

/// A listener, which is closed on drop.
#[derive(Debug)]
pub struct Listening {
    addr: SocketAddr,
    listener: TcpListener,
    serving: Serving,
}

impl Listening {
    /// Listens on an address. This must be called on the control plane's runtime.
    ///
    /// # Errors
    /// Same as `bind(2)`.
    pub fn open(addr: SocketAddr, requests: Requests) -> io::Result<Self> {
        Self::on(TcpListener::bind(addr)?, requests)
    }

    /// Handles requests on a listening socket. This must be called on the control plane's runtime.
    ///
    /// # Errors
    /// Fails if the socket cannot be registered.
    pub fn on(listener: TcpListener, requests: Requests) -> io::Result<Self> {
        let addr = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let socket = tokio::net::TcpListener::from_std(listener.try_clone()?)?;
        let mut router = router().fallback(not_found).with_state(requests);
        // If other hosts can access this address, then a browser there could access it anyway, and
        // the host may have names that we don't know.
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

    /// Stops the server but keeps the socket open, so new connections have to wait.
    pub async fn shut_down(self) -> TcpListener {
        self.serving.shut_down().await;
        self.listener
    }

    /// Returns the local address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn gzip_requires_acceptance_of_client() {
        let accepts = |value: &'static str| {
            let value = HeaderValue::from_static(value);
            accepts_gzip(&HeaderMap::from_iter([(ACCEPT_ENCODING, value)]))
        };
        for value in ["gzip", "deflate, gzip;q=0.5", "br , GZIP ; q=1"] {
            assert!(accepts(value), "{value}");
        }
        for value in ["", "identity", "gzip;q=0", "gzip; q=0.000, br", "x-gzipped"] {
            assert!(!accepts(value), "{value}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }

    #[test]
    fn foreign_host_names_are_rejected() {
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
