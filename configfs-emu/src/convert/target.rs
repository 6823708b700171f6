//! Converts portal groups to targets.

use std::net::{IpAddr, SocketAddr};

use serde_json::{Map, Value, json};

use super::access::{Group, access};
use super::{Omission, merge, origin};
use crate::rules::{Fabric, Kind, Tree, portal_address, target_name};
use crate::tree::NodeId;
use crate::world::World;

/// Default port for SRP if not set in the tree.
pub(super) const SRP_PORT: u16 = 5555;

/// Converts a portal group to a target in the document. Returns `None` if it should not be served.
pub(super) fn target(
    group: &Group<'_>,
    world: &dyn World,
    omitted: &mut Vec<Omission>,
) -> Option<Map<String, Value>> {
    let now = plain(group, world, omitted)?;
    let hidden = |name| group.tree.hidden(group.tpg, name);
    Some(merge(hidden(origin::ORIGINAL), hidden(origin::SEEN), now))
}

/// Converts a portal group using only its directory.
pub(super) fn plain(
    group: &Group<'_>,
    world: &dyn World,
    omitted: &mut Vec<Omission>,
) -> Option<Map<String, Value>> {
    let Group {
        tree, tpg, fabric, ..
    } = *group;
    if tree.value(tpg, "enable") != "1" {
        return None;
    }
    let portals = match fabric {
        Fabric::Iscsi => iscsi_portals(tree, tpg),
        Fabric::Srpt => srp_portals(tree, tpg, world),
    };
    // LIO can enable a group without portals, but for the daemon such a target is an error.
    if portals.is_empty() {
        return None;
    }
    let access = access(group, omitted);
    let mut doc = Map::new();
    doc.insert("name".to_owned(), json!(target_name(tree, tpg)));
    if fabric == Fabric::Iscsi {
        let iqn = &tree.dir(tree.parent(tpg)).name;
        doc.insert("iqn".to_owned(), json!(iqn));
    }
    doc.insert("portals".to_owned(), Value::Array(portals));
    doc.insert("luns".to_owned(), Value::Object(access.luns));
    doc.insert("access".to_owned(), access.access);
    if let Some(chap) = access.chap {
        doc.insert("chap".to_owned(), chap);
    }
    Some(doc)
}

fn portal(protocol: &str, listen: &str) -> Value {
    json!({ "protocol": protocol, "listen": listen })
}

/// Returns the portals in `np`.
fn iscsi_portals(tree: &Tree, tpg: NodeId) -> Vec<Value> {
    let np = tree.child(tpg, "np").expect("it comes with it");
    let mut portals = Vec::new();
    for (name, id) in tree.subdirs(np) {
        let address = portal_address(name).expect("checked by mkdir");
        let listen = listen(address);
        let on_rdma = tree.value(id, "iser") == "1";
        if !(on_rdma && tree.hidden(id, origin::NO_TCP).is_some()) {
            portals.push(portal("iscsi", &listen));
        }
        if on_rdma {
            portals.push(portal("iser", &listen));
        }
    }
    portals
}

/// Formats an address for `riserd`. The unspecified IPv6 address also includes IPv4.
fn listen(address: SocketAddr) -> String {
    match address.ip() {
        IpAddr::V6(ip) if ip.is_unspecified() => format!(":{}", address.port()),
        _ => address.to_string(),
    }
}

fn srp_portals(tree: &Tree, tpg: NodeId, world: &dyn World) -> Vec<Value> {
    let port = srp_port(tree, tpg);
    let name = &tree.dir(tree.parent(tpg)).name;
    let addresses: Vec<IpAddr> = world.port_addresses(name);
    let listens = addresses.into_iter().map(|ip| SocketAddr::new(ip, port));
    listens
        .map(|listen| portal("srp", &listen.to_string()))
        .collect()
}

fn srp_port(tree: &Tree, tpg: NodeId) -> u16 {
    let fabric = tree.above(tpg, |dir| matches!(dir.kind, Kind::Fabric(_)));
    let discovery = fabric.and_then(|fabric| tree.child(fabric, "discovery_auth"));
    let port = tree.value(discovery.expect("it comes with it"), "rdma_cm_port");
    match port.parse() {
        Ok(0) | Err(_) => SRP_PORT,
        Ok(port) => port,
    }
}
