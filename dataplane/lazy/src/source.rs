// SPDX-License-Identifier: Apache-2.0
//! Where a layer's data is: a file of a (shared) file system, or HTTP with ranges.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ureq::Agent;
use ureq::http::StatusCode;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};

use crate::{Error, Result};

const CONNECT: Duration = Duration::from_secs(5);
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Reads ranges of one object.
#[derive(Debug)]
pub enum Source {
    /// A file. It is opened for each read: a file system that came back has new handles.
    File(PathBuf),
    /// An address.
    Http(Box<Http>),
}

/// An object on an HTTP server.
#[derive(Debug)]
pub struct Http {
    agent: Agent,
    url: String,
}

impl Source {
    /// Read an address or an absolute path.
    pub fn parse(text: &str) -> Result<Self> {
        if text.starts_with("http://") || text.starts_with("https://") {
            return Ok(Source::Http(Box::new(Http {
                agent: agent(),
                url: text.to_owned(),
            })));
        }
        let path = PathBuf::from(text);
        if path.is_absolute() {
            return Ok(Source::File(path));
        }
        Err(Error::new(
            "a source is an address (http, https) or an absolute path",
        ))
    }

    /// Read `len` bytes from `at`, within `limit` (files: for as long as the kernel takes).
    ///
    /// `size` is the length that the object must have, where the store tells it.
    pub fn read(&self, at: u64, len: usize, size: u64, limit: Duration) -> Result<Vec<u8>> {
        match self {
            Source::File(path) => {
                let told = |e: std::io::Error| Error::io("the store's file", &e);
                let mut data = vec![0; len];
                let file = File::open(path).map_err(told)?;
                file.read_exact_at(&mut data, at).map_err(told)?;
                Ok(data)
            }
            Source::Http(http) => http.read(at, len, size, limit),
        }
    }
}

impl Http {
    fn read(&self, at: u64, len: usize, size: u64, limit: Duration) -> Result<Vec<u8>> {
        let last = at + len as u64 - 1;
        // The address is left out of every message: a signed one is a secret.
        let told = |e: ureq::Error| Error::new(format!("the store cannot be read: {e}"));
        let response = self
            .agent
            .get(&self.url)
            .header("range", format!("bytes={at}-{last}"))
            .header("accept-encoding", "identity")
            .config()
            .timeout_global(Some(limit))
            .build()
            .call()
            .map_err(told)?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {}
            StatusCode::OK => return Err(Error::new("the store ignores ranges")),
            other => return Err(Error::new(format!("the store answered with {other}"))),
        }
        let wanted = format!("bytes {at}-{last}/");
        let range = response
            .headers()
            .get("content-range")
            .and_then(|v| v.to_str().ok());
        let total = range.and_then(|text| text.strip_prefix(wanted.as_str()));
        if total.is_none_or(|total| total != "*" && total.parse() != Ok(size)) {
            return Err(Error::new(
                "the store sent another range, or the object's length changed",
            ));
        }
        let mut data = Vec::with_capacity(len);
        response
            .into_body()
            .into_reader()
            .take(len as u64 + 1)
            .read_to_end(&mut data)
            .map_err(|e| Error::io("the store broke off", &e))?;
        if data.len() != len {
            return Err(Error::new(format!(
                "the store sent {} of {len} bytes",
                data.len()
            )));
        }
        Ok(data)
    }
}

fn agent() -> Agent {
    let tls = TlsConfig::builder().root_certs(authorities()).build();
    Agent::config_builder()
        .tls_config(tls)
        // A store that sends us elsewhere decides what this machine connects to: it may not.
        .max_redirects(0)
        .http_status_as_error(false)
        .timeout_connect(Some(CONNECT))
        .timeout_resolve(Some(CONNECT))
        .user_agent(concat!("opendsec-lazy/", env!("CARGO_PKG_VERSION")))
        .proxy(None)
        .build()
        .into()
}

/// The machine's certificate authorities, so that a private one counts; Mozilla's if it has none.
fn authorities() -> RootCerts {
    let path = std::env::var_os("SSL_CERT_FILE").unwrap_or_else(|| AUTHORITIES.into());
    let Ok(text) = std::fs::read(path) else {
        return RootCerts::WebPki;
    };
    let found: Vec<Certificate<'static>> = parse_pem(&text)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if found.is_empty() {
        RootCerts::WebPki
    } else {
        RootCerts::Specific(Arc::new(found))
    }
}
