//! Routes of a config's `ipam` section, which host-local's configuration and ours both have.

use super::json::{self, Fault, Value};
use super::result::Route;

/// The routes of an `ipam` section, whoever gives the addresses.
pub(super) fn routes(root: &Value) -> Result<Vec<Route>, String> {
    let mut routes = Vec::new();
    if let Some(value) = root.get("ipam").and_then(|ipam| ipam.get("routes")) {
        json::list(value, &mut routes, route).map_err(|fault| match fault {
            Fault::Text(text) => format!("ipam.routes of the network config: {text}"),
            fault @ Fault::Type { .. } => fault.inside("ipam.routes").to_string(),
        })?;
    }
    Ok(routes.into_iter().flatten().collect())
}

/// A route is read afresh, also over one that is there.
pub(super) fn route(value: &Value, into: &mut Option<Route>) -> Result<(), Fault> {
    let mut route = Route::default();
    json::fields(value, |key, value| match key {
        "dst" => json::cidr(value, &mut route.dst),
        "gw" => json::ip(value, &mut route.gw),
        "mtu" => json::int(value, &mut route.mtu),
        "advmss" => json::int(value, &mut route.advmss),
        "priority" => json::int(value, &mut route.priority),
        "table" => maybe_int(value, &mut route.table),
        "scope" => maybe_int(value, &mut route.scope),
        _ => Ok(()),
    })?;
    *into = (*value != Value::Null).then_some(route);
    Ok(())
}

fn maybe_int(value: &Value, into: &mut Option<i64>) -> Result<(), Fault> {
    let mut number = 0;
    json::int(value, &mut number)?;
    *into = (*value != Value::Null).then_some(number);
    Ok(())
}
