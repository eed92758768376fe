use super::*;

fn cidrs(texts: &[&str]) -> Vec<Cidr> {
    let read = texts.iter().map(|text| Cidr::parse_strict(text).unwrap());
    read.collect()
}

fn addrs(texts: &[&str]) -> Vec<Addr> {
    let read = texts.iter().map(|text| Addr::parse_strict(text).unwrap());
    read.collect()
}

/// Returns the ranges of the created pool, IPv4 first.
fn created(cluster: &Cluster) -> Vec<String> {
    let pool = decide(cluster, AllocationMode::NodeCIDR).unwrap();
    assert_eq!(pool.metadata.name.as_deref(), Some(NAME));
    assert_eq!(pool.spec.allocation_mode, AllocationMode::NodeCIDR);
    let v4 = pool.spec.ipv4.into_iter().flat_map(|it| it.cidrs);
    v4.chain(pool.spec.ipv6.into_iter().flat_map(|it| it.cidrs))
        .collect()
}

fn error(cluster: &Cluster) -> String {
    decide(cluster, AllocationMode::NodeCIDR)
        .unwrap_err()
        .to_string()
}

const DUAL: &str = "\
apiServer: {}
apiVersion: kubeadm.k8s.io/v1beta4
controllerManager:
  extraArgs:
  - name: node-cidr-mask-size-ipv4
    value: \"25\"
kind: ClusterConfiguration
kubernetesVersion: v1.36.3
networking:
  dnsDomain: cluster.local
  podSubnet: 10.50.0.0/16,fd00:50::/56
  serviceSubnet: 10.96.0.0/16,fd00:96::/112
proxy: {}
";

#[test]
fn flags_come_first_then_kubeadm_then_a_private_range() {
    let flags = cidrs(&["fd00:1::/48", "10.1.0.0/16", "10.3.0.0/16"]);
    let node_addresses = addrs(&["192.0.2.1"]);
    let mut cluster = Cluster {
        flags: &flags,
        kubeadm: Some(DUAL),
        node_addresses: &node_addresses,
        ..Cluster::default()
    };
    let of_flags = ["10.1.0.0/16", "10.3.0.0/16", "fd00:1::/48"];
    assert_eq!(created(&cluster), of_flags);
    cluster.flags = &[];
    assert_eq!(created(&cluster), ["10.50.0.0/16", "fd00:50::/56"]);
    cluster.kubeadm = None;
    assert_eq!(created(&cluster), ["10.244.0.0/16"]);
}

#[test]
fn a_source_of_one_family_decides_for_both() {
    let (node_addresses, flags) = (
        addrs(&["192.0.2.1", "2001:db8::1"]),
        cidrs(&["10.1.0.0/16"]),
    );
    let cluster = Cluster {
        flags: &flags,
        kubeadm: Some(DUAL),
        node_addresses: &node_addresses,
        ..Cluster::default()
    };
    assert_eq!(created(&cluster), ["10.1.0.0/16"]);
    let cluster = Cluster {
        flags: &[],
        kubeadm: Some("networking: {podSubnet: 'fd00:50::/56'}"),
        ..cluster
    };
    assert_eq!(created(&cluster), ["fd00:50::/56"]);
}

#[test]
fn private_ranges_keep_clear_of_nodes_and_services() {
    let v4 = |nodes: &[&str], services: &[&str], kubeadm| {
        let cluster = Cluster {
            node_addresses: &addrs(nodes),
            services: &cidrs(services),
            kubeadm,
            ..Cluster::default()
        };
        created(&cluster).remove(0)
    };
    assert_eq!(v4(&["10.244.7.1"], &[], None), "10.64.0.0/14");
    assert_eq!(
        v4(&["10.67.0.9"], &["10.244.0.0/20"], None),
        "10.128.0.0/14"
    );
    assert_eq!(v4(&["192.0.2.1"], &["10.0.0.0/8"], None), "172.20.0.0/14");
    let kubeadm = "networking:\n  podSubnet: \"\"\n  serviceSubnet: 10.244.0.0/16\n";
    assert_eq!(v4(&["192.0.2.1"], &[], Some(kubeadm)), "10.64.0.0/14");
}

#[test]
fn families_are_those_of_the_nodes() {
    let of = |nodes: &[&str]| {
        let cluster = Cluster {
            node_addresses: &addrs(nodes),
            ..Cluster::default()
        };
        created(&cluster)
    };
    assert_eq!(of(&["fd00:10:244::7"]), ["fd00:10:64::/48"]);
    assert_eq!(
        of(&["192.0.2.1", "192.0.2.2", "2001:db8::1"]),
        ["10.244.0.0/16", "fd00:10:244::/48"]
    );
    let text = error(&Cluster::default());
    assert!(text.contains("before a node has an address"), "{text}");
}

#[test]
fn no_private_range_is_an_error_that_names_them() {
    let node_addresses = addrs(&["192.0.2.1", "2001:db8::1"]);
    for (services, named) in [
        (["0.0.0.0/0"], "192.168.0.0/16"),
        (["::/0"], "fd00:10:244::/48"),
    ] {
        let services = cidrs(&services);
        let text = error(&Cluster {
            node_addresses: &node_addresses,
            services: &services,
            ..Cluster::default()
        });
        assert!(
            text.contains(named) && text.contains("create an IPPool"),
            "{text}"
        );
    }
}

#[test]
fn kubeadms_configuration_is_read_leniently_or_is_an_error() {
    let of = |kubeadm| Cluster {
        kubeadm: Some(kubeadm),
        ..Cluster::default()
    };
    let lenient = "networking: {podSubnet: ' 10.050.0.1/16 , FD00:50::/56 '}";
    assert_eq!(created(&of(lenient)), ["10.50.0.0/16", "fd00:50::/56"]);
    // A YAML parser might read this text as a number or a map.
    assert_eq!(
        created(&of("networking:\n  podSubnet: 1:2::/64\n")),
        ["1:2::/64"]
    );
    for nothing in [
        "{}",
        "networking:",
        "networking: {}",
        "networking: {podSubnet: }",
        "",
    ] {
        let text = error(&of(nothing));
        assert!(text.contains("before a node"), "{nothing:?}: {text}");
    }
    for (text, named) in [
        ("networking: [", "ClusterConfiguration"),
        (
            "networking: {podSubnet: [10.0.0.0/16]}",
            "ClusterConfiguration",
        ),
        (
            "networking: {podSubnet: 10.0.0.0}",
            "`10.0.0.0` is not a CIDR",
        ),
        (
            "networking: {podSubnet: '10.0.0.0/16,x'}",
            "`x` is not a CIDR",
        ),
    ] {
        let error = error(&of(text));
        assert!(
            error.contains(named)
                && error.contains("create an IPPool")
                && error.lines().count() == 1,
            "{error}"
        );
    }
}

#[test]
fn a_range_without_room_for_a_block_is_an_error() {
    for (range, block) in [("10.1.2.0/25", "/24"), ("fd00::/112", "/64")] {
        let flags = cidrs(&["10.0.0.0/16", range]);
        let text = error(&Cluster {
            flags: &flags,
            ..Cluster::default()
        });
        assert!(text.contains(range) && text.contains(block), "{text}");
    }
}

#[test]
fn private_ranges_are_disjoint_and_overlap_no_usual_service_range() {
    for family in Family::ALL {
        let mut seen = cidrs(&[
            "10.96.0.0/12",
            "10.43.0.0/16",
            "172.17.0.0/16",
            "fd00:10:96::/112",
        ]);
        for range in cidrs(PRIVATE.get(family)) {
            assert_eq!(range.family(), family);
            assert!(!seen.iter().any(|it| it.overlaps(&range)), "{range}");
            seen.push(range);
        }
    }
}
