from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.price", "analysis.timing traces=FOLDER head=FOLDER")
