//! Reservations and registrations of a device: `core/HOST/NAME/pr/`.
//!
//! We always show the current state of the daemon. If a device is not served, it has no
//! reservations.

use std::fmt::Write as _;

use riser_admin_api::live::{LiveRegistrant, LiveReservations};
use rustix::io::Errno;

use super::statistics::{counted, fabric, group, luns_of, tag};
use super::{Attr, Read, Show, Store, Write, device, lun_number, session};
use crate::tree::NodeId;

/// `pr/` of a device.
pub(super) const PR: &[Attr] = &[
    Attr::ro("res_holder", Show::With(show_holder)),
    Attr::ro("res_pr_all_tgt_pts", Show::With(show_ports)),
    Attr::ro("res_pr_generation", Show::With(show_generation)),
    Attr::ro("res_pr_holder_tg_port", Show::With(show_holders_port)),
    Attr::ro("res_pr_registered_i_pts", Show::With(show_registrants)),
    Attr::ro("res_pr_type", Show::With(show_type)),
    Attr::ro("res_type", Show::With(show_kind)),
    Attr::ro("res_aptpl_active", Show::With(show_aptpl)),
    Attr::locked("res_aptpl_metadata", "", Store::With(store_aptpl))
        .shown(Show::With(show_aptpl_ready)),
];

/// Content of the files if there is no persistent reservation holder.
const NO_HOLDER: &str = "No SPC-3 Reservation holder\n";

/// Returns true if initiators can reserve this device.
fn is_reservable(read: &Read<'_>) -> bool {
    let device = device::device_of(read.tree, read.dir);
    let attrib = read.tree.child(device, "attrib");
    read.tree
        .value(attrib.expect("it comes with it"), "emulate_pr")
        == "1"
}

/// Returns the reservations of this device, and its LUNs.
fn reservations(read: &Read<'_>) -> (LiveReservations, Vec<NodeId>) {
    let luns = luns_of(read.tree, device::device_of(read.tree, read.dir));
    // Reservations belong to the unit, no matter which of its LUNs is used.
    let units = counted(read, &luns).into_iter();
    let known = units.map(|unit| unit.reservations).next();
    (known.unwrap_or_default(), luns)
}

/// Returns the registrant that the kernel would report as the holder.
fn holder(all: &LiveReservations) -> Option<&LiveRegistrant> {
    all.kind?;
    let mut registrants = all.registrants.iter();
    registrants
        .find(|registrant| registrant.has_reserved)
        .or(all.registrants.first())
}

/// Returns the port that was used by a registrant, if it's for a LUN of this device.
fn entered(read: &Read<'_>, luns: &[NodeId], registrant: &LiveRegistrant) -> Option<PortLun> {
    let tree = read.tree;
    let mut places = luns.iter().filter_map(|lun| {
        let tpg = group(tree, *lun).ok()?;
        Some(PortLun {
            tpg,
            lun: lun_number(&tree.dir(*lun).name).ok()?,
        })
    });
    let iqn = registrant.target.split_once(",t,").map(|(name, _)| name);
    match iqn {
        Some(name) => places.find(|at| tree.dir(tree.parent(at.tpg)).name == name),
        None => places.find(|at| fabric(tree, at.tpg) == "srpt"),
    }
}

struct PortLun {
    tpg: NodeId,
    lun: u64,
}

/// Returns the fabric of the target port used by a registrant.
fn fabric_of(registrant: &LiveRegistrant) -> &'static str {
    match registrant.target.contains(",t,") {
        true => "iSCSI",
        false => "srpt",
    }
}

/// Returns the name of an initiator port, using the same format as the kernel. For SRP, this is the
/// name of the ACL entry if it exists.
fn named(read: &Read<'_>, entered: Option<&PortLun>, initiator: &str) -> String {
    if initiator.contains(",i,") {
        return initiator.to_owned();
    }
    let acls = entered.and_then(|at| read.tree.child(at.tpg, "acls"));
    let mut entries = acls
        .into_iter()
        .flat_map(|acls| read.tree.subdirs(acls))
        .map(|(name, _)| name);
    match entries.find(|entry| session::is_named(entry, initiator, &[])) {
        Some(entry) => entry.to_owned(),
        None => format!("0x{}", initiator.replace(':', "")),
    }
}

fn show_holder(read: &Read<'_>) -> Result<String, Errno> {
    if !is_reservable(read) {
        return Ok("SPC_RESERVATIONS_DISABLED\n".to_owned());
    }
    let (all, luns) = reservations(read);
    if let Some(initiator) = &all.reserved {
        let (fabric, name) = match initiator.split_once(",i,") {
            Some((name, _)) => ("iSCSI", name.to_owned()),
            None => ("srpt", named(read, None, initiator)),
        };
        return Ok(format!("SPC-2 Reservation: {fabric} Initiator: {name}\n"));
    }
    Ok(match holder(&all) {
        None => NO_HOLDER.to_owned(),
        Some(holder) => {
            let at = entered(read, &luns, holder);
            let name = named(read, at.as_ref(), &holder.initiator);
            format!(
                "SPC-3 Reservation: {} Initiator: {name}\n",
                fabric_of(holder)
            )
        }
    })
}

/// A registration is always for the port that received it.
fn show_ports(read: &Read<'_>) -> Result<String, Errno> {
    Ok(match holder(&reservations(read).0) {
        None => NO_HOLDER,
        Some(_) => "SPC-3 Reservation: Single Target Port registration\n",
    }
    .to_owned())
}

fn show_generation(read: &Read<'_>) -> Result<String, Errno> {
    Ok(format!("{:#010x}\n", reservations(read).0.generation))
}

fn show_holders_port(read: &Read<'_>) -> Result<String, Errno> {
    let tree = read.tree;
    let (all, luns) = reservations(read);
    let Some(holder) = holder(&all) else {
        return Ok(NO_HOLDER.to_owned());
    };
    let at = entered(read, &luns, holder).ok_or(Errno::NODEV)?;
    let (fabric, tag) = (fabric_of(holder), tag(tree, at.tpg));
    let endpoint = &tree.dir(tree.parent(at.tpg)).name;
    let (port, lun) = (holder.relative_id, at.lun);
    Ok(format!(
        "SPC-3 Reservation: {fabric} Target Node Endpoint: {endpoint}\n\
         SPC-3 Reservation: Relative Port Identifier Tag: {port} {fabric} Portal Group Tag: {tag} \
         {fabric} Logical Unit: {lun}\n"
    ))
}

fn show_registrants(read: &Read<'_>) -> Result<String, Errno> {
    let (all, luns) = reservations(read);
    let mut text = "SPC-3 PR Registrations:\n".to_owned();
    if all.registrants.is_empty() {
        text.push_str("None\n");
    }
    for registrant in &all.registrants {
        let at = entered(read, &luns, registrant);
        let fabric = fabric_of(registrant);
        let name = named(read, at.as_ref(), &registrant.initiator);
        let (key, generation) = (&registrant.key, registrant.generation);
        let _ = writeln!(
            text,
            "{fabric} Node: {name} Key: {key} PRgen: {generation:#010x}"
        );
    }
    Ok(text)
}

fn show_type(read: &Read<'_>) -> Result<String, Errno> {
    let (all, _) = reservations(read);
    let kind = match all.kind {
        None => return Ok(NO_HOLDER.to_owned()),
        Some(1) => "Write Exclusive Access",
        Some(3) => "Exclusive Access",
        Some(5) => "Write Exclusive Access, Registrants Only",
        Some(6) => "Exclusive Access, Registrants Only",
        Some(7) => "Write Exclusive Access, All Registrants",
        Some(8) => "Exclusive Access, All Registrants",
        Some(_) => "Unknown SPC-3 PR Type",
    };
    Ok(format!("SPC-3 Reservation Type: {kind}\n"))
}

fn show_kind(read: &Read<'_>) -> Result<String, Errno> {
    Ok(match is_reservable(read) {
        false => "SPC_RESERVATIONS_DISABLED\n",
        true if reservations(read).0.reserved.is_some() => "SPC2_RESERVATIONS\n",
        true => "SPC3_PERSISTENT_RESERVATIONS\n",
    }
    .to_owned())
}

fn show_aptpl(read: &Read<'_>) -> Result<String, Errno> {
    Ok(match is_reservable(read) {
        true if reservations(read).0.persists => "APTPL Bit Status: Activated\n",
        true => "APTPL Bit Status: Disabled\n",
        false => "",
    }
    .to_owned())
}

fn show_aptpl_ready(read: &Read<'_>) -> Result<String, Errno> {
    Ok(match is_reservable(read) {
        true => "Ready to process PR APTPL metadata..\n",
        false => "",
    }
    .to_owned())
}

/// The daemon keeps registrations across a restart itself, so we don't accept any here.
fn store_aptpl(_write: &mut Write<'_>) -> Result<(), Errno> {
    Err(Errno::OPNOTSUPP)
}

#[cfg(test)]
mod tests {
    use riser_admin_api::live::LiveLun;

    use super::*;
    use crate::testing::Fixture;

    const PR: &str = "core/fileio_0/disk/pr";
    const NAME: &str = "iqn.2026-01.example:disk";

    fn registrant(initiator: &str, key: u64) -> LiveRegistrant {
        LiveRegistrant {
            initiator: format!("iqn.2026-01.example:{initiator},i,0x00023d000001"),
            target: format!("{NAME},t,0x0001"),
            relative_id: 7,
            key: format!("{key:#018x}"),
            generation: key as u32,
            has_reserved: false,
        }
    }

    #[track_caller]
    fn says(fixture: &mut Fixture, lines: &[(&str, &str)]) {
        for (name, expected) in lines {
            let said = fixture.read(&format!("{PR}/{name}"));
            assert_eq!(said.as_deref(), Ok(*expected), "{name}");
        }
    }

    fn reserved(fixture: &mut Fixture, reservations: LiveReservations) {
        fixture.world.live.luns = vec![LiveLun {
            target: NAME.to_owned(),
            reservations,
            ..LiveLun::default()
        }];
    }

    #[test]
    fn without_reservations_it_says_so() {
        let mut fixture = Fixture::served();
        let nothing = [
            ("res_holder", NO_HOLDER),
            ("res_pr_all_tgt_pts", NO_HOLDER),
            ("res_pr_generation", "0x00000000\n"),
            ("res_pr_holder_tg_port", NO_HOLDER),
            ("res_pr_registered_i_pts", "SPC-3 PR Registrations:\nNone\n"),
            ("res_pr_type", NO_HOLDER),
            ("res_type", "SPC3_PERSISTENT_RESERVATIONS\n"),
        ];
        says(&mut fixture, &nothing);
        reserved(&mut fixture, LiveReservations::default());
        says(&mut fixture, &nothing);
        fixture.run("echo core/fileio_0/disk/attrib/emulate_pr 0");
        says(
            &mut fixture,
            &[
                ("res_holder", "SPC_RESERVATIONS_DISABLED\n"),
                ("res_type", "SPC_RESERVATIONS_DISABLED\n"),
                ("res_aptpl_active", ""),
            ],
        );
    }

    #[test]
    fn persistent_reservation_shows_holder_and_registrants() {
        let mut fixture = Fixture::served();
        let mut all = LiveReservations {
            generation: 4,
            kind: Some(5),
            persists: true,
            registrants: vec![registrant("one", 0xa), registrant("two", 0xb)],
            reserved: None,
        };
        all.registrants[1].has_reserved = true;
        reserved(&mut fixture, all.clone());
        says(
            &mut fixture,
            &[
                (
                    "res_holder",
                    "SPC-3 Reservation: iSCSI Initiator: \
                     iqn.2026-01.example:two,i,0x00023d000001\n",
                ),
                (
                    "res_pr_all_tgt_pts",
                    "SPC-3 Reservation: Single Target Port registration\n",
                ),
                ("res_pr_generation", "0x00000004\n"),
                (
                    "res_pr_holder_tg_port",
                    "SPC-3 Reservation: iSCSI Target Node Endpoint: iqn.2026-01.example:disk\n\
                     SPC-3 Reservation: Relative Port Identifier Tag: 7 iSCSI Portal Group Tag: 1 \
                     iSCSI Logical Unit: 0\n",
                ),
                (
                    "res_pr_registered_i_pts",
                    "SPC-3 PR Registrations:\n\
                     iSCSI Node: iqn.2026-01.example:one,i,0x00023d000001 \
                     Key: 0x000000000000000a PRgen: 0x0000000a\n\
                     iSCSI Node: iqn.2026-01.example:two,i,0x00023d000001 \
                     Key: 0x000000000000000b PRgen: 0x0000000b\n",
                ),
                (
                    "res_pr_type",
                    "SPC-3 Reservation Type: Write Exclusive Access, Registrants Only\n",
                ),
                ("res_aptpl_active", "APTPL Bit Status: Activated\n"),
            ],
        );
        // The reservation is held by all registrants. If the registrant that created it has been
        // removed, we report the first.
        all.kind = Some(8);
        all.registrants.truncate(1);
        reserved(&mut fixture, all);
        says(
            &mut fixture,
            &[
                (
                    "res_holder",
                    "SPC-3 Reservation: iSCSI Initiator: \
                     iqn.2026-01.example:one,i,0x00023d000001\n",
                ),
                (
                    "res_pr_type",
                    "SPC-3 Reservation Type: Exclusive Access, All Registrants\n",
                ),
            ],
        );
    }

    #[test]
    fn spc2_reservation_shows_only_holder() {
        let mut fixture = Fixture::served();
        let all = LiveReservations {
            reserved: Some("iqn.2026-01.example:client,i,0x00023d000001".to_owned()),
            ..LiveReservations::default()
        };
        reserved(&mut fixture, all);
        says(
            &mut fixture,
            &[
                (
                    "res_holder",
                    "SPC-2 Reservation: iSCSI Initiator: iqn.2026-01.example:client\n",
                ),
                ("res_pr_type", NO_HOLDER),
                ("res_type", "SPC2_RESERVATIONS\n"),
                ("res_aptpl_active", "APTPL Bit Status: Disabled\n"),
            ],
        );
    }

    #[test]
    fn srp_registrant_uses_acl_name() {
        let mut fixture = Fixture::served();
        let port = "srpt/0002:c903:00a1:b2c3";
        let tpg = format!("{port}/0002:c903:00a1:b2c3");
        fixture.run(&format!(
            "mkdir srpt
             mkdir {port}
             mkdir {tpg}
             mkdir {tpg}/lun/lun_3
             ln {tpg}/lun/lun_3/a /sys/kernel/config/target/core/fileio_0/disk
             mkdir {tpg}/acls/0002:c903:00a1:0001
             mkdir {tpg}/acls/0002:c903:00a1:0001/lun_0
             ln {tpg}/acls/0002:c903:00a1:0001/lun_0/b ../../../lun/lun_3"
        ));
        let by_srp = |initiator: &str| LiveRegistrant {
            initiator: initiator.to_owned(),
            target: "0002c90300a1b2c3:0002c90300a1b2c3".to_owned(),
            has_reserved: true,
            ..registrant("", 1)
        };
        for (initiator, name) in [
            ("0000000000000000:0002c90300a10001", "0002:c903:00a1:0001"),
            (
                "0000000000000000:0002c90300a10002",
                "0x00000000000000000002c90300a10002",
            ),
        ] {
            let all = LiveReservations {
                kind: Some(1),
                registrants: vec![by_srp(initiator)],
                ..LiveReservations::default()
            };
            reserved(&mut fixture, all);
            let holder = format!("SPC-3 Reservation: srpt Initiator: {name}\n");
            says(&mut fixture, &[("res_holder", &holder)]);
        }
        let said = fixture
            .read(&format!("{PR}/res_pr_holder_tg_port"))
            .unwrap();
        assert!(
            said.ends_with("srpt Portal Group Tag: 1 srpt Logical Unit: 3\n"),
            "{said}"
        );
    }
}
