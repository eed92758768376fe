module cadastre.dev/e2e/frr-k8s

go 1.26.0

require github.com/metallb/frr-k8s v0.0.26
