//! Checks whether a request comes from this host, and whether a web page in a browser sent it.
//!
//! A web page can make a browser on this host, or behind `kubectl port-forward`, send almost any request. A hostile
//! page can reach the admin port under the host name of its own site, if the site's DNS server answers with a loopback
//! address (DNS rebinding).

use std::net::{IpAddr, SocketAddr};

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

/// The answer to requests whose Host header is not a name of this host.
pub(super) const ANOTHER_NAME: &str =
    "the request's Host is not this machine: ask for 127.0.0.1 or localhost\n";

/// Whether the peer is on this host.
pub(super) fn is_here(peer: SocketAddr) -> bool {
    peer.ip().to_canonical().is_loopback()
}

/// Whether the Host header is a loopback name or address. A request that a hostile web page sends by DNS rebinding has
/// the host name of that page's site instead.
pub(super) fn is_for_here(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    let Ok(authority) = Authority::try_from(host.as_bytes()) else {
        return false;
    };
    let host = authority.host();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || bare
            .parse::<IpAddr>()
            .is_ok_and(|it| it.to_canonical().is_loopback())
}

/// Whether a browser sent the request on behalf of a web page.
pub(super) fn is_of_a_page(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site")
}

/// Middleware that rejects requests whose Host header is not a loopback name or address.
pub async fn by_our_name(request: Request, next: Next) -> Response {
    if !is_for_here(request.headers()) {
        return (StatusCode::FORBIDDEN, ANOTHER_NAME).into_response();
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_loopback_names_are_names_of_this_host() {
        let of = |host: &'static str| {
            HeaderMap::from_iter([(header::HOST, HeaderValue::from_static(host))])
        };
        for host in [
            "localhost",
            "LocalHost:9817",
            "127.0.0.1:9817",
            "127.9.9.9",
            "[::1]:9817",
            "[::ffff:127.0.0.1]:9817",
        ] {
            assert!(is_for_here(&of(host)), "{host}");
        }
        for host in [
            "",
            "x",
            "rebound.example:9817",
            "localhost.example",
            "127.0.0.1.example",
            "user@example",
            "192.0.2.1:9817",
            "[2001:db8::1]",
            "0.0.0.0:9817",
            "[::]",
            "127.0.0.1/..",
        ] {
            assert!(!is_for_here(&of(host)), "{host}");
        }
        assert!(!is_for_here(&HeaderMap::new()));
        let mut two = of("127.0.0.1");
        two.append(header::HOST, HeaderValue::from_static("example"));
        assert!(!is_for_here(&two));
    }
}
