from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.export", "toolkit.decode method=NAME export=true")
