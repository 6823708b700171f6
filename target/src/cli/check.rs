//! Reads configuration files, reports errors with the source line, and describes their contents.

use std::path::Path;

use miette::{LabeledSpan, MietteDiagnostic, NamedSource, Report};
use riser_admin_api::view::PortNames;
use riser_scsi::config::Identity;
use serde::Serialize;

use super::probe::Probe;
use super::{Failure, MISTAKE};
use crate::config::{Access, Config, ConfigError, HostId, Listen, Lun, Portal, Protocol, Target};
use crate::control::identities;
use crate::control::upgrade::ProgramInfo;
use crate::server::identities::Identities;

pub(super) fn load(path: &Path) -> Result<Config, Failure> {
    read(path).map(|(config, _)| config)
}

/// Returns the text of a valid configuration file.
pub(super) fn checked(path: &Path) -> Result<String, Failure> {
    read(path).map(|(_, text)| text)
}

fn read(path: &Path) -> Result<(Config, String), Failure> {
    let mistake = |why: String| Failure::mistake(format!("{}: {why}", path.display()));
    let text = std::fs::read(path).map_err(|e| mistake(format!("cannot read the file: {e}")))?;
    let text = String::from_utf8(text).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        mistake(format!("invalid UTF-8 at byte {at}"))
    })?;
    parse(text, &path.display().to_string())
}

/// Parses a configuration. `name` is used in errors.
pub(super) fn parse(text: String, name: &str) -> Result<(Config, String), Failure> {
    match Config::parse(&text, name) {
        Ok(config) => Ok((config, text)),
        Err(e) => Err(Failure {
            text: report(&e, text),
            code: MISTAKE,
            mistake: Some(Box::new(e)),
        }),
    }
}

/// Formats an error with its source line. The first line is for scripts and editors:
/// `file:line:column: message`. This contains the whole message, so we only add the position below.
fn report(error: &ConfigError, text: String) -> String {
    let offset = error.offset_in(&text);
    let diagnostic = MietteDiagnostic::new("").with_label(LabeledSpan::at_offset(offset, "here"));
    let report = Report::new(diagnostic).with_source_code(NamedSource::new(&error.file, text));
    let place = format!("{report:?}");
    // Omit the line that would contain the message.
    let place = place
        .trim_start()
        .split_once('\n')
        .map_or("", |(_, place)| place);
    format!("{error}\n{}", place.trim_end())
}

/// A valid configuration.
#[derive(Debug, Serialize)]
pub(super) struct Described {
    #[serde(flatten)]
    program: ProgramInfo,
    /// Number of backends.
    #[serde(skip)]
    backends: usize,
    targets: Vec<DescribedTarget>,
    notes: Vec<String>,
    /// Results of opening backends and portals, if requested.
    #[serde(flatten)]
    probe: Option<Probe>,
}

#[derive(Debug, Serialize)]
struct DescribedTarget {
    name: String,
    portals: Vec<DescribedPortal>,
    luns: Vec<DescribedLun>,
    /// True if all initiators are allowed.
    open: bool,
    /// Number of access rules.
    #[serde(skip)]
    rules: usize,
}

#[derive(Debug, Serialize)]
struct DescribedPortal {
    protocol: Protocol,
    listen: Listen,
    #[serde(skip_serializing_if = "Option::is_none")]
    iqn: Option<String>,
    #[serde(flatten)]
    names: Option<PortNames>,
}

#[derive(Debug, Serialize)]
struct DescribedLun {
    lun: u16,
    backend: String,
    serial: String,
    wwn: String,
    read_only: bool,
}

impl Described {
    /// Describes a configuration. If `open` is set, resources are opened and closed again.
    pub(super) fn new(config: &Config, open: bool) -> Self {
        let mut notes = config.notes.clone();
        let kept = identities::kept(&config.state);
        let is_unread = kept.is_err();
        let mut identities = kept.unwrap_or_else(|error| {
            notes.push(format!(
                "cannot read the state directory, so serial numbers may differ: {error}"
            ));
            Identities::default()
        });
        let probe =
            open.then(|| Probe::of(config, |backend| is_unread || identities.knows(backend)));
        let host = identities.host(config);
        let targets = config.targets.iter();
        let target = |target: &Target| DescribedTarget::new(config, target, &host, &identities);
        Self {
            program: ProgramInfo::own(),
            backends: config.backends.len(),
            targets: targets.map(target).collect(),
            notes,
            probe,
        }
    }

    /// Returns whether all resources could be opened.
    pub(super) fn is_served(&self) -> bool {
        self.probe
            .as_ref()
            .is_none_or(|probe| probe.problems.is_empty())
    }

    /// Formats the description for users.
    pub(super) fn text(&self) -> String {
        let mut lines = vec![format!(
            "valid: {} backend(s), {} target(s)",
            self.backends,
            self.targets.len()
        )];
        for target in &self.targets {
            lines.push(format!("target {}", target.name));
            lines.extend(target.portals.iter().map(DescribedPortal::text));
            lines.extend(target.luns.iter().map(DescribedLun::text));
            lines.push(match target.open {
                true => "  access: open to all initiators".to_owned(),
                false => format!("  access: {} rule(s)", target.rules),
            });
        }
        lines.extend(self.notes.iter().map(|n| format!("note: {n}")));
        lines.extend(self.probe.iter().flat_map(Probe::lines));
        lines.join("\n")
    }
}

impl DescribedTarget {
    fn new(config: &Config, target: &Target, host: &HostId, identities: &Identities) -> Self {
        let portal = |portal: &Portal| DescribedPortal::new(target, portal, host);
        let lun = |(number, lun): (&u16, &Lun)| {
            let backend = config.backend(lun);
            let Identity { serial, naa, .. } = identities.clone().identity(config, backend);
            DescribedLun {
                lun: *number,
                backend: backend.name.clone(),
                serial,
                wwn: naa.to_string(),
                read_only: lun.read_only || backend.spec.read_only,
            }
        };
        Self {
            name: target.name.clone(),
            portals: target.portals.iter().map(portal).collect(),
            luns: target.luns.iter().map(lun).collect(),
            open: target.access == Access::Open,
            rules: match &target.access {
                Access::Open => 0,
                Access::Rules(rules) => rules.len(),
            },
        }
    }
}

impl DescribedPortal {
    fn new(target: &Target, portal: &Portal, host: &HostId) -> Self {
        let name = &target.name;
        // Initiators use the IQN for iSCSI and iSER, but GUIDs for SRP. Unless configured, these are
        // derived from the host identity.
        let names = (portal.protocol == Protocol::Srp).then(|| PortNames {
            ioc_guid: portal.ioc_guid(host, name).to_string(),
            service_guid: portal.service_guid(host, name).to_string(),
            id_ext: portal.id_ext(host, name).to_string(),
        });
        let iqn = target.iqn.as_ref().filter(|_| names.is_none());
        Self {
            protocol: portal.protocol,
            listen: portal.listen,
            iqn: iqn.map(ToString::to_string),
            names,
        }
    }

    fn text(&self) -> String {
        let ioc_guid = self.names.as_ref().map(|names| &names.ioc_guid);
        let ioc_guid = ioc_guid.map(|guid| format!("ioc_guid {guid}"));
        let name = ioc_guid.or_else(|| self.iqn.clone()).unwrap_or_default();
        format!("  {} {} {name}", self.protocol, self.listen)
    }
}

impl DescribedLun {
    fn text(&self) -> String {
        let mode = if self.read_only { ", read-only" } else { "" };
        format!(
            "  lun {}: {}, serial {}, wwn-{}{mode}",
            self.lun, self.backend, self.serial, self.wwn
        )
    }
}
