//! Reads configuration files, reports errors with the source line, and describes their contents.

use std::path::Path;

use miette::{LabeledSpan, MietteDiagnostic, NamedSource, Report};
use riser_scsi::config::Identity;
use serde_json::json;

use super::ask::Output;
use super::probe::Probe;
use super::{Failure, MISTAKE};
use crate::config::{Access, Backend, Config, ConfigError, HostId, Protocol};
use crate::control::{identities, upgrade};
use crate::sandbox;
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
#[derive(Debug)]
pub(super) struct Described<'a> {
    config: &'a Config,
    /// Host identity used to derive names.
    host: HostId,
    identities: Identities,
    notes: Vec<String>,
    /// Results of opening backends and portals, if requested.
    probe: Option<Probe>,
}

impl<'a> Described<'a> {
    /// Creates a description. If `open` is set, resources are opened and closed again.
    pub(super) fn new(config: &'a Config, open: bool) -> Self {
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
        Self {
            config,
            host,
            identities,
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

    fn identity(&self, backend: &Backend) -> Identity {
        self.identities.clone().identity(self.config, backend)
    }

    pub(super) fn text(&self, output: Output) -> String {
        match output {
            Output::Json => describe_json(self),
            Output::Text => describe_text(self),
        }
    }
}

fn describe_text(described: &Described<'_>) -> String {
    let (config, host) = (described.config, &described.host);
    let mut lines = vec![format!(
        "valid: {} backend(s), {} target(s)",
        config.backends.len(),
        config.targets.len()
    )];
    for target in &config.targets {
        lines.push(format!("target {}", target.name));
        for portal in &target.portals {
            lines.push(match (portal.protocol, &target.iqn) {
                // Initiators use the IQN for iSCSI and iSER, but GUIDs for SRP. Unless configured,
                // these are derived from the host identity.
                (Protocol::Iscsi | Protocol::Iser, Some(iqn)) => {
                    format!("  {} {} {iqn}", portal.protocol, portal.listen)
                }
                _ => {
                    let guid = portal.ioc_guid(host, &target.name);
                    format!("  srp {} ioc_guid {guid}", portal.listen)
                }
            });
        }
        for (number, lun) in &target.luns {
            let backend = config.backend(lun);
            let Identity { serial, naa, .. } = described.identity(backend);
            let mode = if lun.read_only || backend.spec.read_only {
                ", read-only"
            } else {
                ""
            };
            lines.push(format!(
                "  lun {number}: {}, serial {serial}, wwn-{naa}{mode}",
                backend.name
            ));
        }
        lines.push(match &target.access {
            Access::Open => "  access: open to all initiators".to_owned(),
            Access::Rules(rules) => format!("  access: {} rule(s)", rules.len()),
        });
    }
    lines.extend(described.notes.iter().map(|n| format!("note: {n}")));
    lines.extend(described.probe.iter().flat_map(Probe::lines));
    lines.join("\n")
}

fn describe_json(described: &Described<'_>) -> String {
    let (config, host) = (described.config, &described.host);
    let targets: Vec<_> = config
        .targets
        .iter()
        .map(|t| {
            let portals: Vec<_> = t
                .portals
                .iter()
                .map(|p| match (p.protocol, &t.iqn) {
                    (Protocol::Iscsi | Protocol::Iser, Some(iqn)) => json!({
                        "protocol": p.protocol.to_string(),
                        "listen": p.listen.to_string(),
                        "iqn": iqn.as_str(),
                    }),
                    _ => json!({
                        "protocol": "srp",
                        "listen": p.listen.to_string(),
                        "ioc_guid": p.ioc_guid(host, &t.name).to_string(),
                        "id_ext": p.id_ext(host, &t.name).to_string(),
                        "service_guid": p.service_guid(host, &t.name).to_string(),
                    }),
                })
                .collect();
            let luns: Vec<_> = t
                .luns
                .iter()
                .map(|(number, lun)| {
                    let backend = config.backend(lun);
                    let identity = described.identity(backend);
                    json!({
                        "lun": number,
                        "backend": backend.name,
                        "serial": identity.serial,
                        "wwn": identity.naa.to_string(),
                        "read_only": lun.read_only || backend.spec.read_only,
                    })
                })
                .collect();
            json!({
                "name": t.name,
                "portals": portals,
                "luns": luns,
                "open": t.access == Access::Open,
            })
        })
        .collect();
    // `valid`, `takes_over` and `system_calls` are checked by a daemon before an upgrade to this
    // program, so they must not change.
    let mut document = json!({
        "valid": true,
        "version": env!("CARGO_PKG_VERSION"),
        "takes_over": [upgrade::VERSION],
        "system_calls": sandbox::system_calls(),
        "targets": targets,
        "notes": described.notes,
    });
    if let Some(probe) = &described.probe {
        document["backends"] = json!(probe.opened);
        document["problems"] = json!(probe.problems);
    }
    document.to_string()
}
